// The page: which view is shown, and for whom. Everything comes from the API, with the key of this tab.

import { SERVER, read, readKey, unfollow } from "./api.js";
import { connect as connectCurves, hideCurves, showCurves } from "./curves.js";
import { drawEngines, showEngines } from "./engines.js";
import { drawHealth, showHealth } from "./health.js";
import { showLineage } from "./lineage.js";
import { $, MOST_RUNS, element, linkTo } from "./parts.js";
import { showRollouts } from "./rollouts.js";
import { connect as connectRuns, nowOf, renewRuns, showRuns } from "./runs.js";
import { drawTime, showTime } from "./time.js";

const REFRESH_MS = 2000; // of views that are read again and again
const LIST_MS = 5000; // of the list of runs
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
  $("now").hidden = true;
}

const isShared = () => new URLSearchParams(location.hash.slice(1)).has("share");

// Link the views of a run to each other. Who came by a shared link sees its curves alone.
function linkViews(id, shown) {
  $("run-views").hidden = isShared();
  $("run-views").replaceChildren(...OF_RUN.map((view) => element("a", {
    href: linkTo(id, view === "curves" ? {} : { view }), textContent: view, ariaCurrent: view === shown ? "page" : null,
  })));
}

// Say above every view of a run what it does at this moment.
async function drawNow(id) {
  if (isShared()) return;
  const run = await read(`/runs/${encodeURIComponent(id)}`);
  const told = [run.name, `${run.steps.toLocaleString("en")} ${run.steps === 1 ? "step" : "steps"}`, run.state_reason ?? run.state, nowOf(run)];
  $("now").textContent = told.filter(Boolean).join(" · ");
  $("now").hidden = false;
}

function showForm() {
  show("ask");
  $("snippet").textContent =
    `import tinker\n\nservice = tinker.ServiceClient(base_url="${SERVER}", api_key="tml-...")`;
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
    await Promise.all([drawNow(ids[0]), showRollouts(ids[0], asked.get("step"), asked.get("rollout"))]);
    await refresh(() => drawNow(ids[0]), LIST_MS);
  } else if (ids.length && asked.get("view") === "time") {
    show("time");
    linkViews(ids[0], "time");
    await Promise.all([drawNow(ids[0]), showTime(ids[0])]);
    await refresh(() => Promise.all([drawNow(ids[0]), drawTime(ids[0])]), SLOWLY_MS);
  } else if (ids.length && asked.get("view") === "lineage") {
    show("lineage");
    linkViews(ids[0], "lineage");
    await Promise.all([drawNow(ids[0]), showLineage(ids[0])]);
    await refresh(() => drawNow(ids[0]), LIST_MS);
  } else if (ids.length) {
    show("curves");
    if (ids.length > 1) return showCurves(ids, tell);
    linkViews(ids[0], "curves");
    await Promise.all([drawNow(ids[0]), showCurves(ids, tell)]);
    await refresh(() => drawNow(ids[0]), LIST_MS);
  } else {
    show("runs");
    await showRuns();
    await refresh(renewRuns, LIST_MS);
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
