// What each engine does, and what waits for it.

import { read } from "./api.js";
import { $, bytes, duration, element, facts, moment, number, table } from "./parts.js";

export async function showEngines() {
  document.title = "engines - tinsmith";
  await drawEngines();
  $("engines-title").focus();
}

export async function drawEngines() {
  const found = await read("/engines");
  $("storage").textContent = found.storage ?? `Disk: ${diskOf(found)}`;
  $("storage").className = found.storage ? "lost" : "quiet";
  $("cards").replaceChildren(...found.engines.map(cardOf));
  $("hosts").replaceChildren(...(found.hosts ?? []).map(hostOf));
}

export function diskOf(found) {
  return found.storage ?? `${bytes(found.free_bytes)} free, of which ${bytes(Math.min(found.reserve_bytes, found.free_bytes))} are in reserve.`;
}

const earlier = new Map(); // traffic by host and interface, as it was reported before

function hostOf(host) {
  const gpus = host.gpus.map((gpu) => [
    String(gpu.number), gpu.name, gpu.utilization === undefined ? "" : `${Math.round(100 * gpu.utilization)} %`, `${bytes(gpu.used_bytes)} of ${bytes(gpu.total_bytes)}`,
  ]);
  const traffic = host.interfaces.map((each) => [each.name, ...rates(host, each), bytes(each.received_bytes), bytes(each.sent_bytes)]);
  const head = element("h2", {}, `Host ${host.host}`, " ", element("span", { className: "quiet", textContent: `reported ${moment(host.reported_at)}` }));
  return element(
    "article", {}, head,
    gpus.length ? table(`GPUs of ${host.host}`, ["GPU", "Model", "Busy", "Memory"], gpus) : element("p", { className: "quiet", textContent: "No GPU is reported." }),
    ...(traffic.length ? [table(`network of ${host.host}`, ["Interface", "In", "Out", "Received", "Sent"], traffic)] : []),
  );
}

// What an interface carried each second, between the last two reports.
function rates(host, each) {
  const key = `${host.host} ${each.name}`, time = Date.parse(host.reported_at) / 1000;
  const known = earlier.get(key) ?? { time, ...each, rates: ["", ""] };
  if (time > known.time) {
    const rate = (field) => `${bytes((each[field] - known[field]) / (time - known.time))}/s`;
    known.rates = [rate("received_bytes"), rate("sent_bytes")];
  }
  earlier.set(key, { time, ...each, rates: known.rates });
  return known.rates;
}

function cardOf(engine) {
  const head = element("h2", {}, engine.base_model, " ", element("span", { className: engine.state, textContent: engine.state }));
  const work = engine.work.length ? [...mostOf(engine.work), workOf(engine.work)] : [element("p", { className: "quiet", textContent: "Nothing waits." })];
  const isPlanned = engine.memory?.planned_total !== undefined;
  const told = facts([
    ["does", engine.detail && engine.progress !== undefined ? `${engine.detail}, ${Math.round(100 * engine.progress)} %` : engine.detail],
    ["before", engine.restarted],
    ["no samples", engine.sampler],
    ["restarts", engine.restarts || undefined],
    ["works since", engine.running_s === undefined ? undefined : duration(engine.running_s)],
    ["devices", engine.turn && `${engine.turn} has them${engine.turn_awaited ? ", the other side waits" : ""}`],
    ["memory", isPlanned || !engine.resident_bytes ? undefined : bytes(engine.resident_bytes)],
    ["saves compared", engine.saves && `${engine.saves.consistent} agree, ${engine.saves.inconsistent} refused, ${engine.saves.not_compared} not compared`],
    ["largest difference", engine.saves?.largest_difference === undefined ? undefined : `${number(engine.saves.largest_difference)} nats`],
  ]);
  return element("article", {}, head, told, ...work, ...(isPlanned ? [memoryOf(engine.memory)] : []));
}

// Say which of several tenants has most of the work, if one has.
function mostOf(work) {
  const numbers = new Map();
  for (const each of work) numbers.set(each.tenant, (numbers.get(each.tenant) ?? 0) + each.number);
  const [[tenant, most], [, next] = [null, most]] = [...numbers].sort((a, b) => b[1] - a[1]);
  if (most === next) return [];
  const all = [...numbers.values()].reduce((sum, number) => sum + number);
  return [element("p", { textContent: `Most of what is pending is ${tenant}'s: ${most.toLocaleString("en")} of ${all.toLocaleString("en")} operations.` })];
}

// The memory as it was planned, part by part, beside what is used of it.
function memoryOf({ planned, planned_total: total, limit, used, used_of: of }) {
  const whole = Math.max(used, total, limit ?? 0);
  const row = (name, size, kind) => {
    const bar = element("div", { className: `bar-of ${kind}`, role: "img", ariaLabel: `${Math.round(100 * size / whole)} %` });
    bar.style.width = `${100 * size / whole}%`;
    return [name, bytes(size), bar];
  };
  const rows = [
    ...Object.entries(planned).map(([part, size]) => row(part, size, "part")),
    row("planned in all", total, "planned"),
    row(of === "devices" ? "used of the devices, by all processes" : "used by the engine and its workers", used, used > total ? "over" : "used"),
    ...(limit === undefined ? [] : [row("limit", limit, "limit")]),
  ];
  const made = table("memory", ["Memory", "Size", "Part"], rows);
  made.classList.add("memory");
  return made;
}

function workOf(work) {
  const rows = work.map((each) => [each.tenant, each.kind, each.state, each.number.toLocaleString("en"), duration(each.oldest_s)]);
  return table("pending work", ["Tenant", "Kind", "State", "Number", "Oldest"], rows);
}
