// What each engine does, and what waits for it.

import { read } from "./api.js";
import { $, bytes, duration, element, facts, number, table } from "./parts.js";

export async function showEngines() {
  document.title = "engines - tinsmith";
  await drawEngines();
  $("engines-title").focus();
}

export async function drawEngines() {
  const found = await read("/engines");
  $("storage").textContent = found.storage ?? `Disk: ${bytes(found.free_bytes)} free, of which ${bytes(Math.min(found.reserve_bytes, found.free_bytes))} are in reserve.`;
  $("storage").className = found.storage ? "lost" : "quiet";
  $("cards").replaceChildren(...found.engines.map(cardOf));
}

function cardOf(engine) {
  const head = element("h2", {}, engine.base_model, " ", element("span", { className: engine.state, textContent: engine.state }));
  const work = engine.work.length ? workOf(engine.work) : element("p", { className: "quiet", textContent: "Nothing waits." });
  const told = facts([
    ["does", engine.detail && engine.progress !== undefined ? `${engine.detail}, ${Math.round(100 * engine.progress)} %` : engine.detail],
    ["before", engine.restarted],
    ["no samples", engine.sampler],
    ["restarts", engine.restarts || undefined],
    ["works since", engine.running_s === undefined ? undefined : duration(engine.running_s)],
    ["devices", engine.turn && `${engine.turn} has them${engine.turn_awaited ? ", the other side waits" : ""}`],
    ["saves compared", engine.saves && `${engine.saves.consistent} agree, ${engine.saves.inconsistent} refused, ${engine.saves.not_compared} not compared`],
    ["largest difference", engine.saves?.largest_difference === undefined ? undefined : `${number(engine.saves.largest_difference)} nats`],
  ]);
  return element("article", {}, head, told, work);
}

function workOf(work) {
  const rows = work.map((each) => [each.tenant, each.kind, each.state, each.number.toLocaleString("en"), duration(each.oldest_s)]);
  return table("pending work", ["Tenant", "Kind", "State", "Number", "Oldest"], rows);
}
