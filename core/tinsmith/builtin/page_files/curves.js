// The curves of one run, or of several over each other.

import { follow, read } from "./api.js";
import { nameOf } from "./runs.js";
import { $, colours, dark, element, number, table, told, wordsOf } from "./parts.js";
import { showPoint } from "./point.js";

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
const MOST_ROWS = 100; // of a table

export const charts = new Map(); // by metric
let shown = []; // the runs, and their series by metric; `detail` is of the steps that are shown alone
let zoom = null; // the least and the largest step or time that is shown, if not all are
let frame = 0;
let failed = () => {}; // told of an error that nobody awaits

export async function showCurves(ids, tell) {
  failed = tell;
  zoom = null;
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
    return { id, name: nameOf(id), series: byName(curves), isThin: curves.series.some((each) => each.num_points > each.steps.length) };
  }));
  if (asked !== location.hash) return false;
  shown = found;
  await zoomTo(zoom);
  return true;
}

const byName = (curves) => new Map(curves.series.map((each) => [each.name, each]));

// Show a part of the curves, or all of them. Of a long run, the points that its curves have left out are read.
async function zoomTo(part) {
  zoom = part;
  for (const run of shown) run.detail = null;
  $("whole-run").hidden = !zoom;
  $("range").hidden = $("axis").value === "times";
  $("from-step").value = zoom && !$("range").hidden ? Math.ceil(zoom.min) : "";
  $("to-step").value = zoom && !$("range").hidden ? Math.floor(zoom.max) : "";
  renew();
  if (!zoom) return;
  await Promise.all(shown.filter((run) => run.isThin).map(async (run) => {
    const { first, last } = stepsIn(run, part);
    const detail = await read(`/runs/${encodeURIComponent(run.id)}/metrics?max_points=${MAX_POINTS}&from_step=${first}&num_steps=${last - first + 1}`);
    if (zoom === part) run.detail = byName(detail);
  }));
  if (zoom === part) renew();
}

// The steps of a run in a part, and one more on each side, to which the lines go on.
function stepsIn(run, { min, max }) {
  if ($("axis").value === "steps") return { first: Math.max(Math.ceil(min) - 1, 0), last: Math.floor(max) + 1 };
  let first = 0, last = Infinity;
  for (const { steps, times } of run.series.values()) {
    for (const [at, time] of times.entries()) {
      if (time < min) first = Math.max(first, steps[at]);
      if (time > max) last = Math.min(last, steps[at]);
    }
  }
  return { first, last: Number.isFinite(last) ? last : Math.max(...[...run.series.values()].map((each) => each.steps.at(-1))) };
}

const seriesOf = (run, name) => (run.detail ?? run.series).get(name);

export function hideCurves() {
  shown = [];
  clearCharts();
}

function put(run, name, point, value) {
  putInto(run.series, name, point, value);
  const x = $("axis").value === "steps" ? point.step : point.time;
  if (run.detail && x >= zoom.min && x <= zoom.max) putInto(run.detail, name, point, value);
}

function putInto(known, name, point, value) {
  if (!known.has(name)) known.set(name, { name, steps: [], times: [], values: [] });
  const series = known.get(name);
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
  $("how").hidden = names.length === 0;
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
  const last = element("span", { className: "quiet" });
  const place = element("div");
  const figure = element("figure", {}, element("figcaption", {}, element("span", { textContent: name }), last));
  if (MEANINGS[name]) figure.append(element("div", { className: "quiet", textContent: MEANINGS[name] }));
  figure.append(place);
  $("charts").append(figure);
  const plot = $("tables").checked ? null : plotOf(name, place);
  if (!plot) place.append(tableOf(name));
  return { plot, last, place };
}

function plotOf(name, place) {
  const style = getComputedStyle(document.documentElement);
  const ink = style.getPropertyValue("--quiet"), line = style.getPropertyValue("--line");
  const overTime = $("axis").value === "times";
  const axis = { stroke: ink, grid: { stroke: line, width: 1 }, ticks: { stroke: line, width: 1 } };
  const plot = new uPlot({
    width: Math.max(place.clientWidth, 200), height: HEIGHT, legend: { show: false },
    cursor: { drag: { setScale: false } },
    scales: { x: { time: overTime } },
    axes: [{ ...axis, size: overTime ? 40 : 28, ...(overTime ? {} : { incrs: [1, 2, 5, 10, 20, 50, 100, 200, 500, 1e3, 2e3, 5e3, 1e4, 1e5, 1e6] }) },
      { ...axis, size: widthOf, values: (_, splits, at, space, step) => splits.map((value) => told(value, [value - step, value + step])) }],
    series: [{}, ...shown.map((run, at) => ({ label: run.name, stroke: colours()[at], width: 1.5, points: { size: 4 } }))],
    hooks: {
      setCursor: [() => { charts.has(name) && caption(name, charts.get(name)); }],
      setSelect: [(drawn) => select(drawn)],
    },
  }, [[], ...shown.map(() => [])], place);
  plot.root.setAttribute("role", "img");
  plot.root.tabIndex = 0;
  plot.root.onkeydown = (event) => move(plot, name, event);
  plot.root.onblur = () => document.querySelector("dialog[open]") || plot.setCursor({ left: -10, top: -10 });
  plot.over.onclick = () => choose(plot, name);
  return plot;
}

// The room of the numbers beside a chart, in pixels.
function widthOf(plot, values, at, cycle) {
  return cycle > 1 ? plot.axes[at]._size : Math.max(62, 20 + 7 * Math.max(0, ...(values ?? []).map((each) => each.length)));
}

function select(plot) {
  const { left, width } = plot.select;
  if (!width) return;
  const part = { min: plot.posToVal(left, "x"), max: plot.posToVal(left + width, "x") };
  plot.setSelect({ left: 0, width: 0, top: 0, height: 0 }, false);
  zoomTo(part).catch(failed);
}

// Arrow keys move from point to point, Home and End to the first and the last, and Enter chooses one.
function move(plot, name, event) {
  if (event.key === "Enter") choose(plot, name);
  const x = plot.data[0].filter((each) => !zoom || (each >= zoom.min && each <= zoom.max));
  const last = x.length - 1, at = Number.isInteger(plot.cursor.idx) ? x.indexOf(plot.data[0][plot.cursor.idx]) : x.length;
  const to = { ArrowLeft: at - 1, ArrowRight: at + 1, Home: 0, End: last }[event.key];
  if (to === undefined || last < 0) return;
  event.preventDefault();
  plot.setCursor({ left: plot.valToPos(x[Math.min(Math.max(to, 0), last)], "x"), top: 0 });
}

function choose(plot, name) {
  const x = plot.data[0][plot.cursor.idx];
  for (const series of shown.map((run) => seriesOf(run, name))) {
    const at = series ? series[$("axis").value].indexOf(x) : -1;
    if (at < 0) continue;
    showPoint(shown, series.steps[at]).catch(failed);
    return;
  }
}

function updateChart(name, chart) {
  const axis = $("axis").value;
  const columns = shown.map((run) => {
    const series = seriesOf(run, name);
    return series ? [series[axis], smoothed(series.values)] : [[], []];
  });
  chart.data = columns.length > 1 ? uPlot.join(columns) : columns[0];
  chart.plot?.batch(() => {
    chart.plot.setData(chart.data);
    if (zoom) chart.plot.setScale("x", zoom);
  });
  caption(name, chart);
}

function caption(name, { plot, last, data }) {
  const at = plot?.cursor.idx, isChosen = Number.isInteger(at);
  const places = data.slice(1).map((each) => isChosen ? at : each.findLastIndex((value) => value !== null && value !== undefined));
  const x = isChosen ? `${xOf(data[0], at)}: ` : "";
  last.replaceChildren(x, ...data.slice(1).map((values, run) => {
    const place = places[run];
    const shownValue = element("span", { textContent: `${run ? "  " : ""}${told(values[place], [values[place - 1], values[place + 1]])}` });
    if (data.length > 2) shownValue.style.color = colours()[run];
    return shownValue;
  }));
  plot?.root.setAttribute("aria-label", `${name}: ${last.textContent}`);
}

function xOf(column, at) {
  if ($("axis").value === "steps") return `step ${column[at]}`;
  const seconds = (time, digits) => new Date(time * 1000).toLocaleTimeString("sv", { hour: "2-digit", minute: "2-digit", second: "2-digit", fractionalSecondDigits: digits });
  const beside = [column[at - 1], column[at + 1]].filter((each) => each !== undefined);
  return seconds(column[at], beside.some((each) => seconds(each) === seconds(column[at])) ? 3 : undefined);
}

// The newest points first. It stays as it is while it is read: the caption alone goes on.
function tableOf(name) {
  const axis = $("axis").value;
  const columns = shown.map((run) => seriesOf(run, name)).map((series) => new Map(series?.[axis].map((x, at) => [x, series.values[at]])));
  const all = [...new Set(columns.flatMap((each) => [...each.keys()]))].filter((x) => !zoom || (x >= zoom.min && x <= zoom.max)).sort((a, b) => b - a);
  const few = all.slice(0, MOST_ROWS);
  const rows = few.map((x, at) => [
    axis === "steps" ? x.toLocaleString("en") : xOf(few, at), ...columns.map((each) => (each.has(x) ? String(each.get(x) ?? "not finite") : "")),
  ]);
  const made = table(`values of ${name}`, [axis === "steps" ? "Step" : "Time", ...shown.map((run) => (shown.length > 1 ? run.name : "Value"))], rows);
  if (all.length > few.length) made.append(element("p", { className: "quiet", textContent: `The newest ${few.length} of ${all.length}: choose steps to see others.` }));
  return made;
}

function clearCharts() {
  for (const { plot } of charts.values()) plot?.destroy();
  charts.clear();
  $("charts").replaceChildren();
}

// A part by its first and last step. An empty field stands for the run's own.
function chooseSteps() {
  const of = (id, whole) => ($(id).value === "" ? whole : Number($(id).value));
  const steps = shown.flatMap((run) => [...run.series.values()].flatMap((each) => [each.steps[0], each.steps.at(-1)]));
  const part = { min: of("from-step", Math.min(...steps)) - 0.5, max: of("to-step", Math.max(...steps)) + 0.5 };
  if (!steps.length || part.min > part.max) return;
  zoomTo($("from-step").value === "" && $("to-step").value === "" ? null : part).catch(failed);
}

// Tables stay as they are drawn, so another part of the curves needs others.
function renew() {
  if ($("tables").checked) redraw();
  else draw();
}

function redraw() {
  clearCharts();
  if (shown.length) draw();
}

export function connect() {
  $("pick").oninput = draw;
  $("smooth").oninput = draw;
  $("axis").onchange = () => { clearCharts(); zoomTo(null).catch(failed); };
  $("tables").onchange = redraw;
  $("whole-run").onclick = () => zoomTo(null).catch(failed);
  $("from-step").onchange = $("to-step").onchange = chooseSteps;
  dark.addEventListener("change", redraw);
  let width = innerWidth;
  addEventListener("resize", () => {
    if (width === innerWidth) return;
    width = innerWidth;
    for (const { plot, place } of charts.values()) plot?.setSize({ width: Math.max(place.clientWidth, 200), height: HEIGHT });
  });
}
