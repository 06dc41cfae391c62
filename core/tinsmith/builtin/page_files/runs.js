// The list of runs.

import { read } from "./api.js";
import { $, MOST_RUNS, duration, element, moment, wordsOf } from "./parts.js";

const PAGE = 1000; // runs of one answer
const ROWS = 100; // drawn at a time: a browser takes a second for a thousand
const NEWEST = 100; // read again and again

const list = { runs: [], total: 0, rows: ROWS, chosen: new Set(), tenants: new Set() };

export const nameOf = (id) => list.runs.find((run) => run.run_id === id)?.name ?? id;

export async function showRuns() {
  document.title = "tinsmith";
  Object.assign(list, { runs: [], rows: ROWS });
  await older();
  $("main").focus();
}

async function older() {
  const answer = await read(`/runs?limit=${PAGE}&offset=${list.runs.length}`);
  list.runs.push(...answer.runs);
  list.total = answer.cursor.total_count;
  drawRuns();
}

// Read the newest runs again. Rows stay where they are, and whoever reads them, unless there are new ones.
export async function renewRuns() {
  const answer = await read(`/runs?limit=${NEWEST}`);
  const newest = new Map(answer.runs.map((run) => [run.run_id, run]));
  const known = new Set(list.runs.map((run) => run.run_id));
  const added = answer.runs.filter((run) => !known.has(run.run_id));
  list.runs = [...added, ...list.runs.map((run) => newest.get(run.run_id) ?? run)];
  list.total = answer.cursor.total_count;
  if (added.length) drawRuns();
  else for (const row of $("rows").rows) if (newest.has(row.dataset.run)) fill(row, newest.get(row.dataset.run));
}

async function more() {
  list.rows += ROWS;
  if (list.rows > list.runs.length && list.runs.length < list.total) await older();
  else drawRuns();
}

function textOf(run) {
  const labels = Object.entries(run.user_metadata ?? {}).flat();
  return [run.run_id, run.name, run.base_model, run.state, run.tenant, run.project_id, ...run.tags, ...labels].join(" ").toLowerCase();
}

function drawRuns() {
  const words = wordsOf("filter");
  list.tenants = new Set(list.runs.map((run) => run.tenant));
  const found = list.runs.filter((run) => words.every((word) => textOf(run).includes(word)));
  const focused = document.activeElement.closest("#rows tr")?.dataset.run, tag = document.activeElement.tagName;
  $("rows").replaceChildren(...found.slice(0, list.rows).map(rowOf));
  if (focused) [...$("rows").rows].find((row) => row.dataset.run === focused)?.querySelector(tag).focus();
  $("none").hidden = found.length > 0;
  $("none").textContent = list.runs.length ? "No run has these words." : "No runs yet: one begins when a script creates a training client.";
  $("more").hidden = found.length <= list.rows && list.runs.length >= list.total;
  drawChoice();
}

function drawChoice() {
  const full = list.chosen.size >= MOST_RUNS;
  for (const each of document.querySelectorAll("#rows input")) each.disabled = full && !each.checked;
  $("compare").disabled = list.chosen.size < 1;
  $("compare").textContent = list.chosen.size ? `Compare ${list.chosen.size}` : "Compare";
}

function rowOf(run) {
  const box = element("input", { type: "checkbox", checked: list.chosen.has(run.run_id), ariaLabel: `compare ${run.run_id}` });
  box.onchange = () => {
    if (box.checked) list.chosen.add(run.run_id);
    else list.chosen.delete(run.run_id);
    drawChoice();
  };
  const link = element("a", { href: `#${new URLSearchParams([["run", run.run_id]])}`, textContent: run.name ?? run.run_id });
  const first = element("td", {}, element("span", { className: "name" }, link));
  const tenant = list.tenants.size > 1 ? run.tenant : null; // all tenants' are for administrators
  for (const tag of [tenant, run.project_id, ...run.tags].filter(Boolean)) first.append(" ", element("span", { className: "tag", textContent: tag }));
  if (run.name) first.append(element("div", { className: "quiet", textContent: run.run_id }));
  first.append(element("div", { className: "quiet now" }));
  const row = element(
    "tr", {}, element("td", {}, box), first,
    element("td", { textContent: run.lora_rank ? `${run.base_model}, rank ${run.lora_rank}` : run.base_model }),
    element("td"), element("td", { className: "number" }), element("td"),
  );
  row.dataset.run = run.run_id;
  fill(row, run);
  return row;
}

// Write what changes of a run.
function fill(row, run) {
  const [, , , state, steps, last] = row.cells;
  row.querySelector(".now").textContent = run.state_reason ?? nowOf(run);
  state.textContent = state.className = run.state;
  steps.textContent = run.steps.toLocaleString("en");
  last.textContent = moment(run.last_request_at);
}

// What a run waits for at this moment, and since when.
export const nowOf = ({ waits_for: waits }) => (waits ? `now: ${waits.text} (${duration(waits.since_s)})` : "");

export function connect(tell) {
  $("filter").oninput = () => { list.rows = ROWS; drawRuns(); };
  $("more").onclick = () => more().catch(tell);
  $("compare").onclick = () => { location.hash = new URLSearchParams([...list.chosen].map((id) => ["run", id])); };
}
