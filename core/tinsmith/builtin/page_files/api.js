// The API, asked with the key of this tab, and the stream of what is new.

export const BASE = new URL("../", import.meta.url).pathname; // of this server: a proxy may serve it below a path
export const SERVER = `${location.origin}${BASE}`.replace(/\/$/, ""); // as scripts name it

export function readKey() {
  const hash = new URLSearchParams(location.hash.slice(1)), given = hash.get("key"), known = sessionStorage.getItem("key");
  if (!given) return known;
  hash.delete("key"); // a link may carry it; no server sees it there
  history.replaceState(null, "", `${location.pathname}#${hash}`);
  if (given !== known && mayReplace(known)) sessionStorage.setItem("key", given);
  return sessionStorage.getItem("key");
}

// Whoever wrote the link must not decide as whom its reader goes on.
function mayReplace(known) {
  const signsIn = document.querySelector("script[src$='login.js']") !== null;
  if (known === null && !signsIn) return true;
  return confirm(`This link brings an API key. Use it in this tab instead of ${known === null ? "your sign-in" : "the key that you gave"}?`);
}

export async function ask(path, options = {}) {
  const key = readKey(); // a server without keys asks for none
  const shared = new URLSearchParams(location.hash.slice(1)).get("share"); // the secret of a link to one run
  const known = shared ? { "x-share-secret": shared } : key ? { "x-api-key": key } : {};
  const answer = await fetch(`${BASE}api/v1${path}`, { ...options, headers: { ...options.headers, ...known } });
  if (answer.ok) return answer;
  const detail = await answer.json().then((body) => body.detail ?? body.message, () => answer.statusText);
  throw Object.assign(new Error(typeof detail === "string" ? detail : answer.statusText), { status: answer.status });
}

export async function read(path) {
  return (await ask(path)).json();
}

let followed = null; // what is told, and to whom
let stream = null; // while the page is seen: a browser has six connections for all pages of a server, hidden ones included

// Call `told` with each event of these runs until `unfollow`, and `failed` if the server refuses. `again` reads what came
// while the page was hidden.
export function follow(ids, told, failed, again = async () => {}) {
  unfollow();
  if (!ids.length) return;
  followed = { ids, told, failed, again };
  resume();
}

export function unfollow() {
  followed = null;
  pause();
}

function pause() {
  stream?.abort();
  stream = null;
}

function resume() {
  if (!followed || document.hidden) return;
  const own = (stream = new AbortController()), { ids, told, failed } = followed;
  listen(ids, told, own.signal).catch((error) => own.signal.aborted || failed(error));
}

document.addEventListener("visibilitychange", async () => {
  const known = followed;
  pause();
  if (!known || document.hidden) return;
  await known.again().catch(known.failed);
  if (known === followed && !stream) resume();
});

async function listen(ids, told, signal) {
  const path = `/run_events?${new URLSearchParams(ids.map((id) => ["run", id]))}`;
  const live = document.getElementById("live");
  for (let wait = 0; !signal.aborted;) {
    try {
      const reader = (await ask(path, { signal })).body.pipeThrough(new TextDecoderStream()).getReader();
      live.textContent = "live";
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
      live.textContent = "not connected, trying again";
      wait = Math.min(2 * wait + 1, 30); // seconds
      await new Promise((done) => setTimeout(done, 1000 * wait));
    }
  }
}
