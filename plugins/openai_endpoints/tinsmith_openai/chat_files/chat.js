// The chat page: one or two models answer side by side, token by token, over the endpoints for OpenAI clients.
"use strict";

const $ = (id) => document.getElementById(id);
const SIDES = [0, 1];
const state = { messages: [[], []], running: null };

// The key and the API

function headers() {
  const key = sessionStorage.getItem("key");
  return { "content-type": "application/json", ...(key ? { authorization: `Bearer ${key}` } : {}) };
}

async function ask(path, options = {}) {
  const answer = await fetch(`v1${path}`, { ...options, headers: headers() });
  if (answer.ok) return answer;
  const message = await answer.json().then((body) => body.error.message, () => answer.statusText);
  throw Object.assign(new Error(message), { status: answer.status });
}

function say(text) {
  $("problem").textContent = text;
  $("problem").hidden = !text;
}

function showForm(error) {
  if (sessionStorage.getItem("key") !== null) say(error.message);
  sessionStorage.removeItem("key");
  $("ask").hidden = false;
  $("chat").hidden = $("forget").hidden = true;
  $("key").focus();
}

// Models

async function start() {
  say("");
  try {
    const models = (await (await ask("/models")).json()).data.map((each) => each.id);
    for (const side of SIDES) {
      const options = models.map((id) => new Option(label(id), id));
      $(`model${side}`).replaceChildren(...(side ? [new Option("none", "")] : []), ...options);
    }
    const asked = new URLSearchParams(location.hash.slice(1)).getAll("model");
    asked.slice(0, 2).forEach((id, side) => choose(side, id));
    $("ask").hidden = true;
    $("chat").hidden = false;
    $("forget").hidden = sessionStorage.getItem("key") === null;
    arrange();
    $("text").focus();
  } catch (error) {
    if (error.status === 401) showForm(error);
    else say(error.message);
  }
}

function label(id) { // of a checkpoint, its name first: its run is long
  const [run, , name] = id.startsWith("tinker://") ? id.slice("tinker://".length).split("/") : [];
  return name ? `${name} of ${run}` : id;
}

function choose(side, id) { // a link may name a checkpoint that the list does not have
  const select = $(`model${side}`);
  if (![...select.options].some((each) => each.value === id)) select.add(new Option(label(id), id));
  select.value = id;
}

function used() {
  return SIDES.filter((side) => $(`model${side}`).value);
}

function arrange() {
  $("said1").classList.toggle("unused", !$("model1").value);
}

// Messages

function add(side, role, text) {
  const made = document.createElement("div");
  made.className = `message ${role}`;
  made.textContent = text;
  $(`said${side}`).append(made);
  made.scrollIntoView({ block: "nearest" });
  return made;
}

async function* eventsOf(answer) {
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const events = (rest + value).split("\n\n");
    rest = events.pop();
    for (const event of events) {
      const data = event.replace(/^data: /, "");
      if (data === "[DONE]") return;
      yield JSON.parse(data);
    }
  }
}

async function answerOn(side, signal) {
  const messages = state.messages[side], shown = add(side, "assistant", ""), began = performance.now();
  let text = "", first = null, why = "the answer ended early";
  try {
    const body = {
      model: $(`model${side}`).value, messages, stream: true, stream_options: { include_usage: true },
      max_tokens: Number($("tokens").value), temperature: Number($("temperature").value),
    };
    const answer = await ask("/chat/completions", { method: "POST", body: JSON.stringify(body), signal });
    for await (const event of eventsOf(answer)) {
      if (event.error) throw new Error(event.error.message);
      const [choice] = event.choices;
      if (choice?.delta?.content) {
        first ??= performance.now();
        text += choice.delta.content;
        shown.textContent = text;
        shown.scrollIntoView({ block: "nearest" });
      }
      if (choice?.finish_reason) why = choice.finish_reason === "length" ? "cut off at the token limit" : "";
      if (event.usage) why = [`${event.usage.completion_tokens} tokens`, why].filter(Boolean).join(", ");
    }
  } catch (error) {
    if (error.status === 401) showForm(error);
    why = error.name === "AbortError" ? "stopped" : error.message;
    shown.classList.toggle("failed", error.name !== "AbortError");
  }
  if (shown.classList.contains("failed") || !text) messages.pop(); // as if it had not been asked
  else messages.push({ role: "assistant", content: text });
  const took = first === null ? "" : `first after ${((first - began) / 1000).toFixed(2)}\u00a0s`;
  shown.append(Object.assign(document.createElement("small"), { textContent: [why, took].filter(Boolean).join(", ") }));
}

async function send() {
  const text = $("text").value.trim();
  if (!text || state.running) return;
  say("");
  $("text").value = "";
  state.running = new AbortController();
  [$("send").disabled, $("stop").disabled] = [true, false];
  for (const side of used()) {
    state.messages[side].push({ role: "user", content: text });
    add(side, "user", text);
  }
  await Promise.all(used().map((side) => answerOn(side, state.running.signal)));
  state.running = null;
  [$("send").disabled, $("stop").disabled] = [false, true];
  $("text").focus();
}

function clear() {
  state.running?.abort();
  state.messages = [[], []];
  for (const side of SIDES) $(`said${side}`).replaceChildren();
  $("text").focus();
}

$("ask").addEventListener("submit", (event) => {
  event.preventDefault();
  sessionStorage.setItem("key", $("key").value.trim());
  $("key").value = "";
  start();
});
$("forget").addEventListener("click", () => {
  sessionStorage.removeItem("key");
  clear();
  start();
});
$("say").addEventListener("submit", (event) => { event.preventDefault(); send(); });
$("text").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) { event.preventDefault(); send(); }
});
$("stop").addEventListener("click", () => state.running?.abort());
$("clear").addEventListener("click", clear);
for (const side of SIDES) $(`model${side}`).addEventListener("change", () => { arrange(); clear(); });
start();
