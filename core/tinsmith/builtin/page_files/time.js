// Where the wall time of a run's last iterations went: a bar for each, and the sums by phase.

import { BASE, ask, read } from "./api.js";
import { $, duration, element, moment, table } from "./parts.js";

const SAID = 3; // phases named in the first sentence

export async function showTime(id) {
  document.title = `time of ${id} - tinsmith`;
  $("time-title").textContent = `Where the time of ${id} went`;
  $("iterations").onchange = () => drawTime(id);
  $("trace").onclick = () => download(id).then(() => told(""), (error) => told(error.message));
  told("");
  await drawTime(id);
  $("time-title").focus();
}

export async function drawTime(id) {
  const found = await read(`/runs/${encodeURIComponent(id)}/time?iterations=${$("iterations").value}`);
  const phases = Object.keys(found.phases);
  $("spent").textContent = sentenceOf(found);
  $("phases").replaceChildren(...(phases.length ? [phasesOf(found)] : []));
  $("bars").replaceChildren(...(phases.length ? [barsOf(found)] : []));
}

function told(text) {
  $("trace-problem").textContent = text;
}

const part = (seconds, of) => `${(100 * seconds / of).toFixed(seconds < of / 100 ? 1 : 0)} %`;

const wordsOf = (phase) => phase.replace("wait_", "wait: ").replaceAll("_", " ");

function sentenceOf({ iterations, phases, wall_s: wall, attributed }) {
  if (!iterations.length) return "No iteration has ended yet, or they are past server.result_retention_s: each ends with an optimizer step.";
  const most = Object.entries(phases).sort((a, b) => b[1] - a[1]).slice(0, SAID);
  const named = most.map(([phase, seconds]) => `${wordsOf(phase)} ${part(seconds, wall)}`).join(", ");
  const each = iterations.length > 1 ? `, ${duration(wall / iterations.length)} each` : "";
  return `${iterations.length} iterations in ${duration(wall)}${each}. Most: ${named}. Attributed: ${part(attributed, 1)}.`;
}

const swatch = (phase) => element("span", { className: `swatch at ${phase}` });

function phasesOf({ phases, meanings, wall_s: wall }) {
  const rows = Object.entries(phases).map(([phase, seconds]) => [
    element("div", {}, swatch(phase), " ", wordsOf(phase), element("div", { className: "quiet", textContent: meanings[phase] })),
    part(seconds, wall), duration(seconds),
  ]);
  return table("time by phase", ["Phase", "Part", "Time"], rows);
}

// The newest iteration first. A bar's length is its wall time; what it says is for those who do not see it.
function barsOf({ iterations }) {
  const longest = Math.max(...iterations.map((each) => each.wall_s));
  const rows = iterations.toReversed().map((each) => {
    const step = element("span", { textContent: each.step ?? `seq_id ${each.seq_id}`, title: `from ${moment(each.began_at)}` });
    return [step, duration(each.wall_s), barOf(each, longest)];
  });
  return table("time by step", ["Step", "Time", "Phases"], rows);
}

function barOf({ phases, wall_s: wall }, longest) {
  const known = Object.entries(phases);
  const words = known.map(([phase, seconds]) => `${wordsOf(phase)} ${duration(seconds)}`);
  const bar = element("div", { className: "bar-of", role: "img", ariaLabel: words.join(", ") });
  bar.style.width = `${100 * wall / longest}%`;
  bar.append(...known.map(([phase, seconds], at) => {
    const piece = element("span", { className: `at ${phase}`, title: words[at] });
    piece.style.flexGrow = 100 * seconds / wall; // growth of less than 1 together would leave a gap
    return piece;
  }));
  return bar;
}

// The server signs a link that works without a key, so the browser can save what it sends.
async function download(id) {
  const session = id.split(":")[0];
  const { url } = await (await ask(`/sessions/${encodeURIComponent(session)}/trace_export`)).json();
  element("a", { href: BASE + url.slice(url.indexOf("/api/v1/") + 1), download: `${session}.trace.json` }).click();
}
