// The list of runs.

import { follow, read } from "./api.js";
import { $, MOST_RUNS, element, moment, wordsOf } from "./parts.js";

const PAGE = 1000; // runs of one answer
const ROWS = 100; // drawn at a time: a browser takes a second for a thousand
const FOLLOWED = 16; // by one stream

const list = { runs: [], total: 0, rows: ROWS, chosen: new Set() };

export const nameOf = (id) => list.runs.find((run) => run.run_id === id)?.name ?? id;

export async function showRuns(tell) {
  document.title = "tinsmith";
  Object.assign(list, { runs: [], rows: ROWS });
  await older(tell);
  $("main").focus();
}

async function older(tell) {
  const answer = await read(`/runs?limit=${PAGE}&offset=${list.runs.length}`);
  list.runs.push(...answer.runs);
  list.total = answer.cursor.total_count;
  drawRuns();
  const live = list.runs.filter((run) => run.state === "ready").slice(0, FOLLOWED);
  follow(live.map((run) => run.run_id), count, tell);
}

// Count the steps of a run up.
function count(event) {
  const run = list.runs.find((each) => each.run_id === event.run_id);
  const newest = Math.max(...event.points.filter((each) => "engine_s:sum" in each.values).map((each) => each.step), -1);
  if (newest < run.steps) return;
  run.steps = newest + 1;
  const cell = document.querySelector(`[data-steps="${CSS.escape(run.run_id)}"]`);
  if (cell) cell.textContent = run.steps.toLocaleString("en");
}

async function more(tell) {
  list.rows += ROWS;
  if (list.rows > list.runs.length && list.runs.length < list.total) await older(tell);
  else drawRuns();
}

function textOf(run) {
  const labels = Object.entries(run.user_metadata ?? {}).flat();
  return [run.run_id, run.name, run.base_model, run.state, run.tenant, run.project_id, ...run.tags, ...labels].join(" ").toLowerCase();
}

function drawRuns() {
  const words = wordsOf("filter");
  const found = list.runs.filter((run) => words.every((word) => textOf(run).includes(word)));
  $("rows").replaceChildren(...found.slice(0, list.rows).map(rowOf));
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
  for (const tag of [run.project_id, ...run.tags].filter(Boolean)) first.append(" ", element("span", { className: "tag", textContent: tag }));
  if (run.name) first.append(element("div", { className: "quiet", textContent: run.run_id }));
  if (run.state_reason) first.append(element("div", { className: "quiet", textContent: run.state_reason }));
  const steps = element("td", { className: "number", textContent: run.steps.toLocaleString("en") });
  steps.dataset.steps = run.run_id;
  return element(
    "tr", {}, element("td", {}, box), first,
    element("td", { textContent: run.lora_rank ? `${run.base_model}, rank ${run.lora_rank}` : run.base_model }),
    element("td", { className: run.state, textContent: run.state }), steps,
    element("td", { textContent: moment(run.last_request_at) }),
  );
}

export function connect(tell) {
  $("filter").oninput = () => { list.rows = ROWS; drawRuns(); };
  $("more").onclick = () => more(tell).catch(tell);
  $("compare").onclick = () => { location.hash = new URLSearchParams([...list.chosen].map((id) => ["run", id])); };
}
