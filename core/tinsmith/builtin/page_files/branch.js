// Going on from a checkpoint: the server copies it into a run of its own, and a script goes on from the copy.

import { SERVER, ask, readKey } from "./api.js";
import { $, element, linkTo } from "./parts.js";

let shown = null; // the checkpoint that the dialog is about, and whom to tell of a branch

// The button of a checkpoint from which training can go on.
export function branchButton(checkpoint, told = () => {}) {
  const button = element("button", { type: "button", textContent: "Go on from here", ariaLabel: `Go on from here: ${checkpoint.path}` });
  button.onclick = () => openDialog(checkpoint, told);
  return button;
}

function openDialog(checkpoint, told) {
  shown = { checkpoint, told };
  const name = checkpoint.path.split("/").at(-1);
  $("branch-about").textContent = `${checkpoint.path}, saved at step ${checkpoint.step.toLocaleString("en")}`;
  $("branch-name").value = `from ${name}, step ${checkpoint.step}`;
  $("branch-key").value = "";
  $("branch-key-row").hidden = true;
  $("branch-form").hidden = false;
  $("branch-made").replaceChildren();
  say("");
  $("branch").showModal();
  $("branch-name").select();
}

function say(text) {
  $("branch-problem").textContent = text;
  $("branch-problem").hidden = !text;
}

async function make() {
  const { checkpoint, told } = shown;
  $("branch-do").disabled = true;
  say("");
  try {
    const path = await copy(checkpoint, $("branch-name").value.trim(), $("branch-key").value.trim());
    $("branch-form").hidden = true;
    $("branch-made").replaceChildren(...wayOn(path));
    $("branch-made").querySelector("pre").focus();
    await told();
  } catch (error) {
    const needsKey = error.status === 401; // who reads the page without a key owns nothing
    say(needsKey && !$("branch-key").value && readKey() === null ? "Whose run will it be? Enter the key of your scripts." : error.message);
    $("branch-key-row").hidden = !needsKey;
    if (needsKey) $("branch-key").focus();
  } finally {
    $("branch-do").disabled = false;
  }
}

// The copy gets its name from a session without a client. After a refusal, the session ends by itself.
async function copy(checkpoint, name, key) {
  const headers = { "content-type": "application/json", ...(key ? { "x-api-key": key } : {}) };
  const post = async (path, body) => (await ask(path, { method: "POST", headers, body: JSON.stringify(body) })).json();
  const { session_id: session } = await post("/create_session", { display_name: name, tags: ["branch"] });
  const { tinker_path: path } = await post("/copy_weights", { source_path: checkpoint.path, session_id: session, model_seq_id: 0 });
  await post(`/sessions/${session}/finish`, { reason: { type: "success" }, detail: "it was made on the page, for a copy of a checkpoint" });
  return path;
}

// What goes on from the copy: no server can run the user's script.
function wayOn(path) {
  const run = path.slice("tinker://".length).split("/")[0];
  const link = element("a", { href: linkTo(run, { view: "lineage" }), textContent: $("branch-name").value });
  link.onclick = () => $("branch").close();
  const lines = [
    "import tinker", "", `service = tinker.ServiceClient(base_url="${SERVER}")`,
    `training = service.create_training_client_from_state_with_optimizer("${path}").result()`,
  ];
  return [
    element("p", {}, "The copy is in a run of its own, ", link, ". A script trains on from it, with its key in ", element("code", { textContent: "TINKER_API_KEY" }), ":"),
    element("pre", { textContent: lines.join("\n"), tabIndex: 0, ariaLabel: "the script" }),
  ];
}

$("branch-form").onsubmit = (event) => {
  event.preventDefault();
  make();
};
$("branch-close").onclick = () => $("branch").close();
