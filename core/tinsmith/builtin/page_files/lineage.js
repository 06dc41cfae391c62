// Which runs a run came from, which came from it, and its checkpoints.

import { read } from "./api.js";
import { branchButton } from "./branch.js";
import { $, bytes, element, linkTo, moment, table } from "./parts.js";

const MOST_LOADS = 3; // of one run that are named

export async function showLineage(id) {
  document.title = `lineage of ${id} - tinsmith`;
  $("lineage-title").textContent = `Lineage of ${id}`;
  const found = await drawTree(id);
  $("checkpoints").replaceChildren(...checkpointsOf(found, () => drawTree(id)), ...waysOn(found));
  $("lineage-title").focus();
}

async function drawTree(id) {
  const found = await read(`/runs/${encodeURIComponent(id)}/lineage`);
  $("tree").replaceChildren(treeOf(found));
  $("whole").textContent = found.complete ? "" : `Only the nearest ${found.runs.length} runs are shown.`;
  return found;
}

// A run stands below the first one whose weights it took; others are named beside it.
function treeOf(found) {
  const parentOf = (run) => run.origins.find((each) => each.source && each.source !== run.run_id)?.source;
  const below = Map.groupBy(found.runs, parentOf);
  const drawn = new Set();
  const branch = (run) => {
    drawn.add(run.run_id);
    const children = (below.get(run.run_id) ?? []).filter((each) => !drawn.has(each.run_id));
    const item = element("li", {}, nodeOf(run, run.run_id === found.run_id));
    if (children.length) item.append(element("ul", {}, ...children.map(branch)));
    return item;
  };
  const roots = (below.get(undefined) ?? []).map(branch);
  for (const run of found.runs) if (!drawn.has(run.run_id)) roots.push(branch(run)); // runs that have loaded from each other
  return element("ul", { className: "tree" }, ...roots);
}

function nodeOf(run, isShown) {
  const link = element("a", { href: linkTo(run.run_id, { view: "lineage" }), textContent: run.name ?? run.run_id, ariaCurrent: isShown ? "true" : null });
  const about = [run.name ? run.run_id : "", run.base_model, run.state_reason ?? run.state, `${run.steps.toLocaleString("en")} steps`].filter(Boolean).join(", ");
  const node = element("div", {}, element("span", { className: "name" }, link), " ", element("span", { className: "quiet", textContent: about }));
  for (const each of run.origins.slice(-MOST_LOADS)) {
    const step = `, counting on from step ${each.step.toLocaleString("en")}`;
    node.append(element("div", { className: "quiet", textContent: `from ${each.path}${step}, ${moment(each.created_at)}` }));
  }
  if (run.origins.length > MOST_LOADS) node.append(element("div", { className: "quiet", textContent: `and ${run.origins.length - MOST_LOADS} loads before` }));
  return node;
}

// What to write to go on from here, or from a state that was not saved.
function waysOn({ run_id: id, checkpoints }) {
  const newest = checkpoints.find((each) => each.kind === "training")?.path;
  const going = `training = service.create_training_client_from_state_with_optimizer("${newest}").result()`;
  const back = `tinsmith replay ${id} --until SEQ_ID --to tinker://${id}/weights/NAME`;
  const command = (label, text) => [element("p", { textContent: label }), element("pre", { textContent: text, tabIndex: 0 })];
  return [
    ...(newest ? command("A new run goes on from the newest of them, in a script:", going) : []),
    ...command("A state that was not saved becomes a checkpoint, on the server's machine:", back),
  ];
}

function checkpointsOf({ checkpoints, num_checkpoints: number }, told) {
  if (!number) return [element("p", { className: "quiet", textContent: "It has no checkpoint." })];
  const rows = checkpoints.map((each) => [
    element("code", { textContent: each.path }), each.kind === "training" ? branchButton(each, told) : "", each.kind, each.step.toLocaleString("en"), moment(each.created_at), bytes(each.size_bytes),
    each.public ? "everybody" : "", each.expires_at ? moment(each.expires_at) : "",
  ]);
  const more = number > rows.length ? [element("p", { className: "quiet", textContent: `The newest ${rows.length} of ${number}.` })] : [];
  return [table("checkpoints", ["Checkpoint", "Time travel", "Kind", "Step", "Saved", "Size", "Read by", "Expires"], rows), ...more];
}
