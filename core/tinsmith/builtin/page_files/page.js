// The page: runs, and the curves of one or several. Everything comes from the API, with the key of this tab.
"use strict";

const $ = (id) => document.getElementById(id);
const COLOURS = { // light, dark; told apart by people who see no red or green, too
  light: ["#0b5fc2", "#b35900", "#00734d", "#8f3d8f", "#a3203c", "#5c6670", "#006d80", "#6b5900"],
  dark: ["#6cb0ff", "#ffa657", "#3fd0a0", "#e29be2", "#ff8b93", "#aab4be", "#4fd1e5", "#e3c84f"],
};
const FIRST = [/loss/, /reward/, /norm/, /kl/, /tokens_per_s/]; // these charts come first
const PAGE = 1000; // runs of one answer
const ROWS = 100; // drawn at a time: a browser takes a second for a thousand
const MAX_POINTS = 1000;
const REFRESH_MS = 2000;

const state = { runs: [], total: 0, rows: ROWS, chosen: new Set(), shown: [], charts: new Map(), stream: null, frame: 0 };
const dark = matchMedia("(prefers-color-scheme: dark)");

// The key and the API

function readKey() {
  const hash = new URLSearchParams(location.hash.slice(1));
  if (hash.get("key")) { // a link may carry it; no server sees it there
    sessionStorage.setItem("key", hash.get("key"));
    hash.delete("key");
    history.replaceState(null, "", `${location.pathname}#${hash}`);
  }
  return sessionStorage.getItem("key");
}

async function ask(path, options = {}) {
  const key = readKey(); // a server without keys asks for none
  const answer = await fetch(`/api/v1${path}`, { ...options, headers: key ? { "x-api-key": key } : {} });
  if (answer.ok) return answer;
  const detail = await answer.json().then((body) => body.detail ?? body.message, () => answer.statusText);
  throw Object.assign(new Error(typeof detail === "string" ? detail : answer.statusText), { status: answer.status });
}

function tell(error) {
  if (error.status === 401) {
    const refused = readKey() !== null;
    sessionStorage.removeItem("key");
    showForm();
    if (refused) say(error.message);
  } else say(error.message);
}

function say(text) {
  $("problem").textContent = text;
  $("problem").hidden = !text;
}

function show(id) {
  for (const each of ["ask", "runs", "curves", "engines"]) $(each).hidden = each !== id;
  $("forget").hidden = readKey() === null;
}

function showForm() {
  stop();
  show("ask");
  $("snippet").textContent =
    `import tinker\n\nservice = tinker.ServiceClient(base_url="${location.origin}", api_key="tml-...")`;
  $("key").focus();
}

// Runs

async function showRuns() {
  stop();
  show("runs");
  document.title = "tinsmith";
  Object.assign(state, { runs: [], rows: ROWS });
  await older();
  $("main").focus();
}

async function older() {
  const answer = await (await ask(`/runs?limit=${PAGE}&offset=${state.runs.length}`)).json();
  state.runs.push(...answer.runs);
  state.total = answer.cursor.total_count;
  drawRuns();
  const live = state.runs.filter((run) => run.state === "ready").slice(0, 16);
  follow(live.map((run) => run.run_id), (event) => {
    const run = state.runs.find((each) => each.run_id === event.run_id);
    const newest = Math.max(...event.points.filter((each) => "engine_s:sum" in each.values).map((each) => each.step), -1);
    if (newest >= run.steps) {
      run.steps = newest + 1;
      const cell = document.querySelector(`[data-steps="${CSS.escape(run.run_id)}"]`);
      if (cell) cell.textContent = run.steps.toLocaleString("en");
    }
  });
}

async function more() {
  state.rows += ROWS;
  if (state.rows > state.runs.length && state.runs.length < state.total) await older();
  else drawRuns();
}

function textOf(run) {
  const labels = Object.entries(run.user_metadata ?? {}).flat();
  return [run.run_id, run.name, run.base_model, run.state, run.tenant, run.project_id, ...run.tags, ...labels].join(" ").toLowerCase();
}

function drawRuns() {
  const words = $("filter").value.toLowerCase().split(/\s+/).filter(Boolean);
  const found = state.runs.filter((run) => words.every((word) => textOf(run).includes(word)));
  $("rows").replaceChildren(...found.slice(0, state.rows).map(rowOf));
  $("none").hidden = found.length > 0;
  $("none").textContent = state.runs.length ? "No run has these words." : "No runs yet: one begins when a script creates a training client.";
  $("more").hidden = found.length <= state.rows && state.runs.length >= state.total;
  $("compare").disabled = state.chosen.size < 1;
  $("compare").textContent = state.chosen.size ? `Compare ${state.chosen.size}` : "Compare";
}

function element(tag, properties = {}, ...children) {
  const made = Object.assign(document.createElement(tag), properties);
  made.append(...children);
  return made;
}

function rowOf(run) {
  const box = element("input", { type: "checkbox", checked: state.chosen.has(run.run_id), ariaLabel: `compare ${run.run_id}` });
  box.onchange = () => {
    if (box.checked) state.chosen.add(run.run_id);
    else state.chosen.delete(run.run_id);
    const full = state.chosen.size >= COLOURS.light.length;
    for (const each of document.querySelectorAll("#rows input")) each.disabled = full && !each.checked;
    $("compare").disabled = state.chosen.size < 1;
    $("compare").textContent = state.chosen.size ? `Compare ${state.chosen.size}` : "Compare";
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
    element("td", { textContent: new Date(run.last_request_at).toLocaleString("sv") }),
  );
}

// Engines

async function showEngines() {
  stop();
  show("engines");
  document.title = "engines - tinsmith";
  const asked = location.hash;
  await drawEngines();
  $("engines-title").focus();
  while (asked === location.hash && !$("engines").hidden) {
    await new Promise((done) => setTimeout(done, REFRESH_MS));
    if (asked === location.hash && !document.hidden) await drawEngines();
  }
}

async function drawEngines() {
  const found = await (await ask("/engines")).json();
  $("storage").textContent = found.storage ?? `Disk: ${bytes(found.free_bytes)} free, of which ${bytes(Math.min(found.reserve_bytes, found.free_bytes))} are in reserve.`;
  $("storage").className = found.storage ? "lost" : "quiet";
  $("cards").replaceChildren(...found.engines.map(cardOf));
}

function cardOf(engine) {
  const facts = [];
  const fact = (name, value) => value !== undefined && value !== "" && facts.push(element("dt", { textContent: name }), element("dd", { textContent: value }));
  fact("does", engine.detail && engine.progress !== undefined ? `${engine.detail}, ${Math.round(100 * engine.progress)} %` : engine.detail);
  fact("before", engine.restarted);
  fact("no samples", engine.sampler);
  fact("restarts", engine.restarts || undefined);
  fact("works since", engine.running_s === undefined ? undefined : duration(engine.running_s));
  fact("devices", engine.turn && `${engine.turn} has them${engine.turn_awaited ? ", the other side waits" : ""}`);
  fact("saves compared", engine.saves && `${engine.saves.consistent} agree, ${engine.saves.inconsistent} refused, ${engine.saves.not_compared} not compared`);
  fact("largest difference", engine.saves?.largest_difference === undefined ? undefined : `${number(engine.saves.largest_difference)} nats`);
  const head = element("h2", {}, engine.base_model, " ", element("span", { className: engine.state, textContent: engine.state }));
  const work = engine.work.length ? workOf(engine.work) : element("p", { className: "quiet", textContent: "Nothing waits." });
  return element("article", {}, head, element("dl", {}, ...facts), work);
}

function workOf(work) {
  const headings = ["Tenant", "Kind", "State", "Number", "Oldest"].map((text) => element("th", { scope: "col", textContent: text }));
  const rows = work.map((each) => element("tr", {}, ...[each.tenant, each.kind, each.state, each.number.toLocaleString("en"), duration(each.oldest_s)]
    .map((text) => element("td", { textContent: text }))));
  const table = element("table", {}, element("thead", {}, element("tr", {}, ...headings)), element("tbody", {}, ...rows));
  return element("div", { className: "scroll", tabIndex: 0, role: "region", ariaLabel: "pending work" }, table);
}

function duration(seconds) {
  return seconds < 120 ? `${number(Math.round(seconds * 10) / 10)} s` : seconds < 7200 ? `${Math.round(seconds / 60)} min` : `${Math.round(seconds / 3600)} h`;
}

function bytes(count) {
  return count < 1e9 ? `${Math.round(count / 1e6)} MB` : `${Math.round(count / 1e8) / 10} GB`;
}

// Curves

async function showCurves(ids) {
  stop();
  show("curves");
  document.title = `${ids.length > 1 ? `${ids.length} runs` : ids[0]} - tinsmith`;
  $("title").textContent = ids.length > 1 ? `${ids.length} runs` : ids[0];
  const asked = location.hash;
  const known = new Map(state.runs.map((run) => [run.run_id, run]));
  const shown = await Promise.all(ids.map(async (id) => {
    const curves = await (await ask(`/runs/${encodeURIComponent(id)}/metrics?max_points=${MAX_POINTS}`)).json();
    return { id, name: known.get(id)?.name ?? id, series: new Map(curves.series.map((each) => [each.name, each])) };
  }));
  if (asked !== location.hash) return; // the reader has gone on meanwhile
  state.shown = shown;
  $("title").focus();
  draw();
  follow(ids, (event) => {
    const run = state.shown.find((each) => each.id === event.run_id);
    for (const point of event.points) for (const [name, value] of Object.entries(point.values)) put(run, name, point, value);
    state.frame ||= requestAnimationFrame(() => { state.frame = 0; draw(); });
  });
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
  const colours = COLOURS[dark.matches ? "dark" : "light"];
  const words = $("pick").value.toLowerCase().split(/\s+/).filter(Boolean);
  const names = [...new Set(state.shown.flatMap((run) => [...run.series.keys()]))]
    .filter((name) => words.every((word) => name.toLowerCase().includes(word)))
    .sort((a, b) => rank(a) - rank(b) || (a < b ? -1 : 1));
  $("legend").hidden = state.shown.length < 2 && state.shown.every((run) => run.name === run.id);
  $("legend").replaceChildren(...state.shown.map((run, at) => {
    const swatch = element("span", { className: "swatch" });
    swatch.style.background = colours[at];
    return element("li", {}, swatch, " ", run.name);
  }));
  $("empty").hidden = names.length > 0 || words.length > 0;
  if (names.join("\n") !== [...state.charts.keys()].join("\n")) {
    clearCharts();
    for (const name of names) state.charts.set(name, makeChart(name, colours));
  }
  for (const [name, chart] of state.charts) updateChart(name, chart);
}

function smoothed(values) {
  const weight = Number($("smooth").value);
  let mean = null;
  return values.map((value) => (value === null ? null : (mean = mean === null ? value : weight * mean + (1 - weight) * value)));
}

function number(value) {
  return value === null || value === undefined ? "" : Math.abs(value) >= 1e5 ? value.toExponential(2) : String(Number(value.toPrecision(4)));
}

function makeChart(name, colours) {
  const style = getComputedStyle(document.documentElement);
  const ink = style.getPropertyValue("--quiet"), line = style.getPropertyValue("--line");
  const overTime = $("axis").value === "times";
  const last = element("span", { className: "quiet" });
  const place = element("div");
  const figure = element("figure", {}, element("figcaption", {}, element("span", { textContent: name }), last), place);
  $("charts").append(figure);
  const axis = { stroke: ink, grid: { stroke: line, width: 1 }, ticks: { stroke: line, width: 1 } };
  const plot = new uPlot({
    width: Math.max(place.clientWidth, 200), height: 190, legend: { show: false },
    scales: { x: { time: overTime } },
    axes: [{ ...axis, size: overTime ? 40 : 28, ...(overTime ? {} : { incrs: [1, 2, 5, 10, 20, 50, 100, 200, 500, 1e3, 2e3, 5e3, 1e4, 1e5, 1e6] }) },
      { ...axis, size: 62, values: (_, splits) => splits.map(number) }],
    series: [{}, ...state.shown.map((run, at) => ({ label: run.name, stroke: colours[at], width: 1.5, points: { size: 4 } }))],
    hooks: { setCursor: [() => { state.charts.has(name) && caption(name, state.charts.get(name)); }] },
  }, [[], ...state.shown.map(() => [])], place);
  plot.root.setAttribute("role", "img");
  return { plot, last, place };
}

function updateChart(name, chart) {
  const axis = $("axis").value;
  const tables = state.shown.map((run) => {
    const series = run.series.get(name);
    return series ? [series[axis], smoothed(series.values)] : [[], []];
  });
  chart.plot.setData(tables.length > 1 ? uPlot.join(tables) : tables[0]);
  caption(name, chart);
}

function caption(name, { plot, last }) {
  const at = plot.cursor.idx;
  const values = plot.data.slice(1).map((each) => at ?? null ? each[at] : each.findLast((value) => value !== null && value !== undefined));
  const x = at ?? null ? `${plot.scales.x.time ? "" : "step "}${plot.scales.x.time ? new Date(plot.data[0][at] * 1000).toLocaleTimeString("sv") : plot.data[0][at]}: ` : "";
  const colours = COLOURS[dark.matches ? "dark" : "light"];
  last.replaceChildren(x, ...values.map((value, run) => {
    const shown = element("span", { textContent: `${run ? "  " : ""}${number(value)}` });
    if (values.length > 1) shown.style.color = colours[run];
    return shown;
  }));
  plot.root.setAttribute("aria-label", `${name}: ${last.textContent}`);
}

function clearCharts() {
  for (const { plot } of state.charts.values()) plot.destroy();
  state.charts.clear();
  $("charts").replaceChildren();
}

// One stream of events for what is shown

function follow(ids, told) {
  state.stream?.abort();
  if (!ids.length) return;
  const stream = (state.stream = new AbortController());
  listen(ids, told, stream.signal).catch((error) => stream.signal.aborted || tell(error));
}

async function listen(ids, told, signal) {
  const path = `/run_events?${new URLSearchParams(ids.map((id) => ["run", id]))}`;
  for (let wait = 0; !signal.aborted;) {
    try {
      const reader = (await ask(path, { signal })).body.pipeThrough(new TextDecoderStream()).getReader();
      $("live").textContent = "live";
      wait = 0;
      let text = "";
      for (let part = await reader.read(); !part.done; part = await reader.read()) {
        const events = (text + part.value).split("\n\n");
        text = events.pop();
        for (const event of events) if (event.startsWith("data: ")) told(JSON.parse(event.slice(6)));
      }
    } catch (error) {
      if (signal.aborted) return;
      if (error.status && error.status < 500 && error.status !== 429) throw error;
      $("live").textContent = "not connected, trying again";
      wait = Math.min(2 * wait + 1, 30); // seconds
      await new Promise((done) => setTimeout(done, 1000 * wait));
    }
  }
}

function stop() {
  state.stream?.abort();
  state.stream = null;
  state.shown = [];
  clearCharts();
  say("");
}

// What is asked for

function route() {
  const asked = new URLSearchParams(location.hash.slice(1));
  if (asked.get("view") === "engines") return void showEngines().catch(tell);
  const ids = asked.getAll("run").slice(0, COLOURS.light.length);
  (ids.length ? showCurves([...new Set(ids)]) : showRuns()).catch(tell);
}

function redraw() {
  clearCharts();
  if (state.shown.length) draw();
}

$("ask").onsubmit = (event) => {
  event.preventDefault();
  sessionStorage.setItem("key", $("key").value.trim());
  $("key").value = "";
  route();
};
$("forget").onclick = () => { sessionStorage.removeItem("key"); route(); };
$("filter").oninput = () => { state.rows = ROWS; drawRuns(); };
$("more").onclick = () => more().catch(tell);
$("compare").onclick = () => { location.hash = new URLSearchParams([...state.chosen].map((id) => ["run", id])); };
$("pick").oninput = draw;
$("smooth").oninput = draw;
$("axis").onchange = redraw;
dark.addEventListener("change", redraw);
addEventListener("hashchange", route);
addEventListener("keydown", (event) => {
  const typing = /INPUT|SELECT/.test(document.activeElement?.tagName ?? "");
  if (event.key === "/" && !typing) {
    event.preventDefault();
    ($("runs").hidden ? $("pick") : $("filter")).focus();
  } else if (event.key === "Escape" && $("runs").hidden) location.hash = "";
});
let width = innerWidth;
addEventListener("resize", () => {
  if (width === innerWidth) return;
  width = innerWidth;
  for (const { plot, place } of state.charts.values()) plot.setSize({ width: Math.max(place.clientWidth, 200), height: 190 });
});
route();
