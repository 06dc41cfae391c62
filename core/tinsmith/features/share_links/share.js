// The button that makes a link to the curves of one run, for people without a key.

import { ask } from "./api.js";
import { $, element } from "./parts.js";

const button = element("button", { id: "share", type: "button", textContent: "Share" });
const made = element("p", { className: "quiet", role: "status", hidden: true });
document.querySelector("#curves .bar").append(button);
$("legend").before(made);

// The run whose owner may share it: one alone, which is not itself seen by a link.
function shownRun() {
  const asked = new URLSearchParams(location.hash.slice(1));
  const ids = asked.getAll("run");
  return ids.length === 1 && !asked.has("share") ? ids[0] : null;
}

function update() {
  button.hidden = $("how-near").hidden = shownRun() === null;
  made.hidden = true;
}

button.onclick = async () => {
  const path = `/runs/${encodeURIComponent(shownRun())}/share_links`;
  try {
    const answer = await ask(path, { method: "POST", body: "{}", headers: { "content-type": "application/json" } });
    const { url } = await answer.json();
    const link = element("a", { href: url, textContent: url });
    made.replaceChildren("Whoever has this link sees these curves, and nothing else: ", link);
  } catch (error) {
    made.textContent = error.message;
  }
  made.hidden = false;
};
addEventListener("hashchange", update);
update();
