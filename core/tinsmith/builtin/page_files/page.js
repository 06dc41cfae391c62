// The page: which view is shown, and for whom. Everything comes from the API, with the key of this tab.

import { readKey, unfollow } from "./api.js";
import { connect as connectCurves, hideCurves, showCurves } from "./curves.js";
import { drawEngines, showEngines } from "./engines.js";
import { drawHealth, showHealth } from "./health.js";
import { showLineage } from "./lineage.js";
import { $, MOST_RUNS, element, linkTo } from "./parts.js";
import { showRollouts } from "./rollouts.js";
import { connect as connectRuns, showRuns } from "./runs.js";
import { drawTime, showTime } from "./time.js";

const REFRESH_MS = 2000; // of views that are read again and again
const SLOWLY_MS = 10_000; // of what costs the server more
const OF_RUN = ["curves", "time", "rollouts", "lineage"]; // views of one run

function tell(error) {
  if (error.status === 401) {
    const refused = readKey() !== null;
    sessionStorage.removeItem("key");
    showForm();
    if (refused) say(error.message);
  } else say(error.message);
}

function say(text) {
  $("problem").textContent = text;
  $("problem").hidden = !text;
}

// Show one section of the page, and end what fills the others.
function show(id) {
  unfollow();
  hideCurves();
  say("");
  for (const each of document.querySelectorAll("[data-view]")) each.hidden = each.id !== id;
  $("forget").hidden = readKey() === null;
  $("run-views").hidden = true;
}

// Link the views of a run to each other. Who came by a shared link sees its curves alone.
function linkViews(id, shown) {
  $("run-views").hidden = new URLSearchParams(location.hash.slice(1)).has("share");
  $("run-views").replaceChildren(...OF_RUN.map((view) => element("a", {
    href: linkTo(id, view === "curves" ? {} : { view }), textContent: view, ariaCurrent: view === shown ? "page" : null,
  })));
}

function showForm() {
  show("ask");
  $("snippet").textContent =
    `import tinker\n\nservice = tinker.ServiceClient(base_url="${location.origin}", api_key="tml-...")`;
  $("key").focus();
}

// Draw a view again and again, as long as it is the one that is looked at.
async function refresh(draw, every = REFRESH_MS) {
  for (const asked = location.hash; ;) {
    await new Promise((done) => setTimeout(done, every));
    if (asked !== location.hash || !$("ask").hidden) return;
    if (document.hidden) continue;
    await draw().then(() => say(""), tell);
  }
}

async function route() {
  const asked = new URLSearchParams(location.hash.slice(1));
  const ids = [...new Set(asked.getAll("run"))].slice(0, MOST_RUNS);
  if (asked.get("view") === "engines") {
    show("engines");
    await showEngines();
    await refresh(drawEngines);
  } else if (asked.get("view") === "health") {
    show("health");
    await showHealth();
    await refresh(drawHealth);
  } else if (ids.length && asked.get("view") === "rollouts") {
    show("rollouts");
    linkViews(ids[0], "rollouts");
    await showRollouts(ids[0], asked.get("step"), asked.get("rollout"));
  } else if (ids.length && asked.get("view") === "time") {
    show("time");
    linkViews(ids[0], "time");
    await showTime(ids[0]);
    await refresh(() => drawTime(ids[0]), SLOWLY_MS);
  } else if (ids.length && asked.get("view") === "lineage") {
    show("lineage");
    linkViews(ids[0], "lineage");
    await showLineage(ids[0]);
  } else if (ids.length) {
    show("curves");
    if (ids.length === 1) linkViews(ids[0], "curves");
    await showCurves(ids, tell);
  } else {
    show("runs");
    await showRuns(tell);
  }
}

const go = () => route().catch(tell);

$("ask").onsubmit = (event) => {
  event.preventDefault();
  sessionStorage.setItem("key", $("key").value.trim());
  $("key").value = "";
  go();
};
$("forget").onclick = () => { sessionStorage.removeItem("key"); go(); };
connectRuns(tell);
connectCurves();
addEventListener("hashchange", go);
addEventListener("keydown", (event) => {
  if (document.querySelector("dialog[open]")) return;
  const typing = /INPUT|SELECT/.test(document.activeElement?.tagName ?? "");
  if (event.key === "/" && !typing) {
    event.preventDefault();
    ($("runs").hidden ? $("pick") : $("filter")).focus();
  } else if (event.key === "Escape" && $("runs").hidden) location.hash = "";
});
go();
