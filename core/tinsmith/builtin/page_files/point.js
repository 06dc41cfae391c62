// One step of one run, or of several: the exact value of every metric, its rollouts, and the checkpoints near it.

import { read } from "./api.js";
import { branchButton } from "./branch.js";
import { $, element, linkTo, moment, table } from "./parts.js";

const NEAR = 3; // checkpoints that are shown

export async function showPoint(runs, step) {
  const shared = new URLSearchParams(location.hash.slice(1)).has("share"); // such a link shows curves alone
  const single = runs.length === 1 && !shared ? runs[0].id : null;
  const [values, lineage] = await Promise.all([
    Promise.all(runs.map((run) => valuesOf(run.id, step))),
    single && read(`/runs/${encodeURIComponent(single)}/lineage`),
  ]);
  $("point-title").textContent = `Step ${step.toLocaleString("en")}`;
  $("point-more").replaceChildren(...(single ? [...checkpointsNear(lineage, step), rolloutsOf(single, step)] : []));
  $("point-values").replaceChildren(tableOf(runs, values));
  $("point").showModal();
}

// The step before it comes along: step_s is the time from there.
async function valuesOf(id, step) {
  const from = Math.max(step - 1, 0);
  const found = await read(`/runs/${encodeURIComponent(id)}/metrics?from_step=${from}&num_steps=2`);
  return new Map(found.series.map((each) => [each.name, each.values[each.steps.indexOf(step)]]).filter(([, value]) => value !== undefined));
}

function tableOf(runs, values) {
  const names = [...new Set(values.flatMap((each) => [...each.keys()]))].sort();
  const rows = names.map((name) => [name, ...values.map((each) => (each.has(name) ? String(each.get(name) ?? "not finite") : ""))]);
  return table("exact values", ["Metric", ...(runs.length > 1 ? runs.map((run) => run.name) : ["Value"])], rows);
}

function checkpointsNear({ checkpoints }, step) {
  const distance = (each) => Math.abs(each.step - step);
  const near = checkpoints.filter((each) => each.kind === "training").sort((a, b) => distance(a) - distance(b)).slice(0, NEAR);
  if (!near.length) return [element("p", { className: "quiet", textContent: "No checkpoint to go on from: a script makes one with save_state." })];
  const rows = near.sort((a, b) => a.step - b.step).map((each) => [
    element("code", { textContent: each.path.split("/").at(-1), title: each.path }), branchButton(each), each.step.toLocaleString("en"), moment(each.created_at),
  ]);
  return [table("checkpoints near this step", ["Checkpoint", "Time travel", "Step", "Saved"], rows)];
}

function rolloutsOf(id, step) {
  const link = element("a", { href: linkTo(id, { view: "rollouts", step }), textContent: "rollouts of this step" });
  link.onclick = () => $("point").close();
  return element("p", {}, link);
}

$("point-close").onclick = () => $("point").close();
