// The curves of one run, or of several over each other.

import { follow, read } from "./api.js";
import { nameOf } from "./runs.js";
import { $, colours, dark, element, number, wordsOf } from "./parts.js";

const FIRST = [/reward/, /loss/, /(^|[^a-z])kl([^a-z]|$)/, /norm/, /tokens_per_s/, /^(step|engine|queued)_s/]; // these charts come first
const MEANINGS = {
  "sampler_kl:mean": "KL of sampler and trainer, in nats for each token",
  "sampler_kl_k3:mean": "the same, by the estimate that is never negative",
  "rollout_kl:mean": "KL of the rollouts' sampler and the trainer, in nats for each token",
  "rollout_kl_k3:mean": "the same, by the estimate that is never negative",
  "tokens_per_s": "trained tokens for each second on the device",
  "step_s": "seconds from the step before to this one",
  "engine_s:sum": "seconds of passes and step on the device",
  "queued_s:max": "longest wait for the engine, in seconds",
};
const HEIGHT = 190;
const MAX_POINTS = 1000;

export const charts = new Map(); // by metric
let shown = []; // the runs, and their series by metric
let frame = 0;

export async function showCurves(ids, tell) {
  const title = ids.length > 1 ? `${ids.length} runs` : ids[0];
  document.title = `${title} - tinsmith`;
  $("title").textContent = title;
  if (!await readCurves(ids)) return;
  $("title").focus();
  follow(ids, (event) => {
    const run = shown.find((each) => each.id === event.run_id);
    for (const point of event.points) for (const [name, value] of Object.entries(point.values)) put(run, name, point, value);
    frame ||= requestAnimationFrame(() => { frame = 0; draw(); });
  }, tell, () => readCurves(ids));
}

// Return false if the reader has gone on meanwhile.
async function readCurves(ids) {
  const asked = location.hash;
  const found = await Promise.all(ids.map(async (id) => {
    const curves = await read(`/runs/${encodeURIComponent(id)}/metrics?max_points=${MAX_POINTS}`);
    return { id, name: nameOf(id), series: new Map(curves.series.map((each) => [each.name, each])) };
  }));
  if (asked !== location.hash) return false;
  shown = found;
  draw();
  return true;
}

export function hideCurves() {
  shown = [];
  clearCharts();
}

function put(run, name, point, value) {
  if (!run.series.has(name)) run.series.set(name, { name, steps: [], times: [], values: [] });
  const series = run.series.get(name);
  let at = series.steps.length;
  while (at > 0 && series.steps[at - 1] >= point.step) at -= 1;
  const same = series.steps[at] === point.step ? 1 : 0;
  series.steps.splice(at, same, point.step);
  series.times.splice(at, same, point.time);
  series.values.splice(at, same, value);
}

function rank(name) {
  const found = FIRST.findIndex((each) => each.test(name));
  return found < 0 ? FIRST.length : found;
}

function draw() {
  const words = wordsOf("pick");
  const names = [...new Set(shown.flatMap((run) => [...run.series.keys()]))]
    .filter((name) => words.every((word) => name.toLowerCase().includes(word)))
    .sort((a, b) => rank(a) - rank(b) || (a < b ? -1 : 1));
  $("legend").hidden = shown.length < 2 && shown.every((run) => run.name === run.id);
  $("legend").replaceChildren(...shown.map((run, at) => {
    const swatch = element("span", { className: "swatch" });
    swatch.style.background = colours()[at];
    return element("li", {}, swatch, element("span", { textContent: run.name }));
  }));
  $("empty").hidden = names.length > 0 || words.length > 0;
  if (names.join("\n") !== [...charts.keys()].join("\n")) {
    clearCharts();
    for (const name of names) charts.set(name, makeChart(name));
  }
  for (const [name, chart] of charts) updateChart(name, chart);
}

function smoothed(values) {
  const weight = Number($("smooth").value);
  let mean = null;
  return values.map((value) => (value === null ? null : (mean = mean === null ? value : weight * mean + (1 - weight) * value)));
}

function makeChart(name) {
  const style = getComputedStyle(document.documentElement);
  const ink = style.getPropertyValue("--quiet"), line = style.getPropertyValue("--line");
  const overTime = $("axis").value === "times";
  const last = element("span", { className: "quiet" });
  const place = element("div");
  const figure = element("figure", {}, element("figcaption", {}, element("span", { textContent: name }), last));
  if (MEANINGS[name]) figure.append(element("div", { className: "quiet", textContent: MEANINGS[name] }));
  figure.append(place);
  $("charts").append(figure);
  const axis = { stroke: ink, grid: { stroke: line, width: 1 }, ticks: { stroke: line, width: 1 } };
  const plot = new uPlot({
    width: Math.max(place.clientWidth, 200), height: HEIGHT, legend: { show: false },
    scales: { x: { time: overTime } },
    axes: [{ ...axis, size: overTime ? 40 : 28, ...(overTime ? {} : { incrs: [1, 2, 5, 10, 20, 50, 100, 200, 500, 1e3, 2e3, 5e3, 1e4, 1e5, 1e6] }) },
      { ...axis, size: 62, values: (_, splits) => splits.map(number) }],
    series: [{}, ...shown.map((run, at) => ({ label: run.name, stroke: colours()[at], width: 1.5, points: { size: 4 } }))],
    hooks: { setCursor: [() => { charts.has(name) && caption(name, charts.get(name)); }] },
  }, [[], ...shown.map(() => [])], place);
  plot.root.setAttribute("role", "img");
  plot.root.tabIndex = 0;
  plot.root.onkeydown = (event) => move(plot, event);
  plot.root.onblur = () => plot.setCursor({ left: -10, top: -10 });
  return { plot, last, place };
}

// Arrow keys move from point to point, Home and End to the first and the last.
function move(plot, event) {
  const last = plot.data[0].length - 1, at = plot.cursor.idx ?? last + 1;
  const to = { ArrowLeft: at - 1, ArrowRight: at + 1, Home: 0, End: last }[event.key];
  if (to === undefined || last < 0) return;
  event.preventDefault();
  const x = plot.data[0][Math.min(Math.max(to, 0), last)];
  plot.setCursor({ left: plot.valToPos(x, "x"), top: 0 });
}

function updateChart(name, chart) {
  const axis = $("axis").value;
  const tables = shown.map((run) => {
    const series = run.series.get(name);
    return series ? [series[axis], smoothed(series.values)] : [[], []];
  });
  chart.plot.setData(tables.length > 1 ? uPlot.join(tables) : tables[0]);
  caption(name, chart);
}

function caption(name, { plot, last }) {
  const at = plot.cursor.idx, isChosen = Number.isInteger(at);
  const values = plot.data.slice(1).map((each) => isChosen ? each[at] : each.findLast((value) => value !== null && value !== undefined));
  const x = isChosen ? `${plot.scales.x.time ? new Date(plot.data[0][at] * 1000).toLocaleTimeString("sv") : `step ${plot.data[0][at]}`}: ` : "";
  last.replaceChildren(x, ...values.map((value, run) => {
    const told = element("span", { textContent: `${run ? "  " : ""}${number(value)}` });
    if (values.length > 1) told.style.color = colours()[run];
    return told;
  }));
  plot.root.setAttribute("aria-label", `${name}: ${last.textContent}`);
}

function clearCharts() {
  for (const { plot } of charts.values()) plot.destroy();
  charts.clear();
  $("charts").replaceChildren();
}

function redraw() {
  clearCharts();
  if (shown.length) draw();
}

export function connect() {
  $("pick").oninput = draw;
  $("smooth").oninput = draw;
  $("axis").onchange = redraw;
  dark.addEventListener("change", redraw);
  let width = innerWidth;
  addEventListener("resize", () => {
    if (width === innerWidth) return;
    width = innerWidth;
    for (const { plot, place } of charts.values()) plot.setSize({ width: Math.max(place.clientWidth, 200), height: HEIGHT });
  });
}
