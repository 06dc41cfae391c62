// Whether all is well: what died and came back, what the gate found, the store, the disk, and who keeps how much.

import { read } from "./api.js";
import { diskOf } from "./engines.js";
import { $, bytes, duration, element, facts, number, table } from "./parts.js";

export async function showHealth() {
  document.title = "health - tinsmith";
  await drawHealth();
  $("health-title").focus();
}

export async function drawHealth() {
  const [found, kept] = await Promise.all([read("/engines"), read("/usage/disk")]);
  $("checks").replaceChildren(enginesOf(found.engines), storeOf(found), keptOf(kept));
}

function times({ number: count, mean_s: mean, most_s: most }) {
  return count ? `${count.toLocaleString("en")}, ${duration(mean)} each${most === undefined ? "" : `, 99 % within ${duration(most)}`}` : "none";
}

function enginesOf(engines) {
  const rows = engines.map((each) => [
    each.base_model, element("span", { className: each.state, textContent: each.state }), String(each.restarts), each.recoveries ? times(each.recoveries) : "none",
    each.saves ? `${each.saves.consistent} agree, ${each.saves.inconsistent} refused, ${each.saves.not_compared} not compared` : "none",
    each.saves?.largest_difference === undefined ? "" : `${number(each.saves.largest_difference)} nats`,
  ]);
  const deaths = engines.filter((each) => each.last_failure ?? each.restarted).map((each) => element("p", { className: "lost", textContent: `${each.base_model}, before: ${each.last_failure ?? each.restarted}` }));
  const headings = ["Engine", "State", "Restarts", "Recoveries", "Saves compared", "Largest difference"];
  return element("article", {}, element("h2", { textContent: "Engines" }), table("engines", headings, rows), ...deaths);
}

function storeOf(found) {
  const told = facts([["disk", diskOf(found)], ["commits of this server", times(found.commits)]]);
  return element("article", {}, element("h2", { textContent: "Store" }), told);
}

function keptOf(kept) {
  const rows = kept.data.map((each) => [
    each.tenant, bytes(each.total_bytes), bytes(each.allowed_bytes), `${Math.round(100 * each.total_bytes / Math.max(1, each.allowed_bytes))} %`,
    bytes(each.checkpoint_bytes), bytes(each.log_bytes),
  ]);
  const headings = ["Tenant", "Keeps", "May keep", "Used", "Checkpoints", "Log"];
  return element("article", {}, element("h2", { textContent: "Quotas" }), table("quotas", headings, rows));
}
