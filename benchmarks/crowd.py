"""Thousands of clients that live: how late their heartbeats are answered, beside long polls and after a crash.

    python benchmarks/crowd.py [--before CHECKOUT] [--sessions 1000 3000 6000 9000] [--polls 5000] [--rounds 1]

With `--before`, each figure is taken of that checkout and of this one, in turn, on the same machine. A server is a
process of its own with the toy backend and default settings, on loopback; this process is its clients, with a
connection each, and takes part of the same cores. All work is bounded: a figure takes a minute or two, and the servers
are stopped.

- *heartbeats*: every session sends one each 10 s, at moments spread evenly. A heartbeat counts from when it was due.
- *beside polls*: the same, while other clients hold long polls for samples that nobody draws. They begin together.
- *after kill -9*: the server and its engines are killed and started again. Clients send again what was not answered,
  after pauses that double from half a second to ten, as the SDK's. Calm: from then on, heartbeats of a second are
  answered within 100 ms (p99).
"""

import argparse
import asyncio
import gc
import json
import os
import random
import resource
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any, Final, Self

import httptools
import orjson
import psutil
import uvloop

from tinsmith.loopback import exempt_loopback

HERE: Final = Path(__file__).resolve().parents[1]
EACH_S: Final = 10.0
"""The SDK's interval between heartbeats of a session."""
WARM_UP_S: Final = 10.0
PER_TENANT: Final = 900  # sessions; a tenant may have 1,000
START_S: Final = 60.0
CALM_MS: Final = 100.0
WATCH_S: Final = 45.0
"""How long the time after a crash is watched."""
FIRST_PAUSE_S, LAST_PAUSE_S = 0.5, 10.0


class GoneError(Exception):
    """The connection was lost before the answer."""


class Client(asyncio.Protocol):
    """A connection, with one request at a time."""

    def __init__(self, port: int, key: str) -> None:
        self._port = port
        self._key = key
        self._transport: asyncio.Transport | None = None
        self._answer: asyncio.Future[tuple[int, bytes]] | None = None
        self._parser: httptools.HttpResponseParser | None = None
        self._body = b""

    async def post(self, path: str, body: object) -> tuple[int, bytes]:
        """Return status and body. Raises GoneError."""
        loop = asyncio.get_running_loop()
        if self._transport is None or self._transport.is_closing():
            try:
                self._transport, _ = await loop.create_connection(lambda: self, "127.0.0.1", self._port)
            except OSError as error:
                raise GoneError(str(error)) from error
        content = orjson.dumps(body)
        head = (
            f"POST /api/v1/{path} HTTP/1.1\r\nhost: 127.0.0.1\r\nx-api-key: {self._key}\r\n"
            f"content-type: application/json\r\ncontent-length: {len(content)}\r\n\r\n"
        )
        self._parser = httptools.HttpResponseParser(self)
        self._body = b""
        self._answer = loop.create_future()
        self._transport.write(head.encode() + content)
        return await self._answer

    def close(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    def data_received(self, data: bytes) -> None:
        if self._parser is not None:
            self._parser.feed_data(data)

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(GoneError(str(exc)))

    def on_body(self, body: bytes) -> None:
        self._body += body

    def on_message_complete(self) -> None:
        assert self._parser is not None
        if self._answer is not None and not self._answer.done():
            self._answer.set_result((self._parser.get_status_code(), self._body))


@dataclass
class Server:
    """`tinsmith serve` of one checkout."""

    checkout: Path
    data_dir: Path
    engines: bool = True
    process: "subprocess.Popen[bytes] | None" = None
    port: int = 0

    def start(self) -> None:
        """Start it, at the same port as before. Return once it answers."""
        command = [sys.executable, "-m", "tinsmith", "serve", "--base-model", "tiny", "--backend", "toy"]
        command += ["--data-dir", str(self.data_dir), "--port", str(self.port), "--server.log_level", "warning"]
        command += ["--server.limits.connections", "16000"]
        if not self.engines:
            command += ["--supervisor.engines", "[]"]
        environment = {**os.environ, "PYTHONPATH": str(self.checkout / "core"), "OMP_NUM_THREADS": "1"}
        log = (self.data_dir.parent / "server.log").open("ab")
        with log:
            self.process = subprocess.Popen(command, env=environment, stdout=log, stderr=log, start_new_session=True)
        lock, deadline = self.data_dir / "server.lock", time.monotonic() + START_S
        while time.monotonic() < deadline:
            with suppress(OSError, ValueError, KeyError):
                described = json.loads(lock.read_text())
                if described.get("pid", self.process.pid) == self.process.pid and described["url"]:
                    self.port = int(described["url"].rpartition(":")[2])
                    return
            time.sleep(0.05)
        raise SystemExit(f"the server of {self.checkout} did not start; see {self.data_dir.parent / 'server.log'}")

    def cpu_s(self) -> float:
        assert self.process is not None
        used = psutil.Process(self.process.pid).cpu_times()
        return float(used.user + used.system)

    def kill(self) -> None:
        """Kill the server and its engines at once."""
        assert self.process is not None
        with suppress(psutil.NoSuchProcess):
            family = psutil.Process(self.process.pid)
            for each in [*family.children(recursive=True), family]:
                with suppress(psutil.NoSuchProcess):
                    each.send_signal(signal.SIGKILL)
        self.process.wait()
        (self.data_dir / "server.lock").unlink(missing_ok=True)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()


@dataclass
class Crowd:
    """Sessions, each with a client that keeps them alive."""

    port: int
    clients: list[tuple[Client, str]] = field(default_factory=list)
    late_ms: list[tuple[float, float]] = field(default_factory=list)  # when it was answered, and how late
    statuses: Counter[int] = field(default_factory=Counter)

    async def open(self, number: int) -> None:
        gate = asyncio.Semaphore(64)

        async def one(place: int) -> tuple[Client, str]:
            client = Client(self.port, f"tml-crowd-{place // PER_TENANT}")
            async with gate:
                status, body = await client.post("create_session", {"tags": [], "sdk_version": "0"})
            if status != 200:
                raise SystemExit(f"create_session: {status} {body[:300]!r}")
            return client, orjson.loads(body)["session_id"]

        self.clients = list(await asyncio.gather(*map(one, range(number))))

    async def beat(self, until: asyncio.Event) -> None:
        """Send heartbeats until the event."""
        began, tasks = asyncio.get_running_loop().time(), []
        for place, (client, session_id) in enumerate(self.clients):
            first = began + EACH_S * place / len(self.clients)
            tasks.append(asyncio.create_task(self._beat(client, session_id, first, until)))
        await asyncio.gather(*tasks)

    async def _beat(self, client: Client, session_id: str, due: float, until: asyncio.Event) -> None:
        loop = asyncio.get_running_loop()
        while True:
            with suppress(TimeoutError):
                await asyncio.wait_for(until.wait(), max(0.0, due - loop.time()))
            if until.is_set():
                return
            status = await insist(client, "session_heartbeat", {"session_id": session_id}, until)
            self.statuses[status] += 1
            self.late_ms.append((loop.time(), 1000 * (loop.time() - due)))
            due = max(due + EACH_S, loop.time())

    def close(self) -> None:
        for client, _ in self.clients:
            client.close()


async def insist(client: Client, path: str, body: object, until: asyncio.Event) -> int:
    """Send a request until it is answered, as the SDK does. Return the status, 0 if the end came first."""
    pause_s = FIRST_PAUSE_S
    while not until.is_set():
        try:
            status, _ = await client.post(path, body)
        except GoneError:
            status = 0
        if status not in (0, 429, 503):
            return status
        await asyncio.sleep(pause_s * random.uniform(0.75, 1))
        pause_s = min(LAST_PAUSE_S, 2 * pause_s)
    return 0


class Polls:
    """Clients that wait for samples."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._polls: list[tuple[Client, str]] = []
        self.answered: list[float] = []

    async def open(self, number: int) -> None:
        asker = Client(self._port, "tml-polls")
        _, body = await asker.post("create_session", {"tags": [], "sdk_version": "0"})
        fields = {"session_id": orjson.loads(body)["session_id"], "sampling_session_seq_id": 0, "base_model": "tiny"}
        _, body = await asker.post("create_sampling_session", fields)
        sampler_id = orjson.loads(body)["sampling_session_id"]
        gate = asyncio.Semaphore(64)

        async def one(place: int) -> tuple[Client, str]:
            client = Client(self._port, "tml-polls")
            prompt = {"chunks": [{"type": "encoded_text", "tokens": [1, 2, 3]}]}
            fields = {"sampling_session_id": sampler_id, "seq_id": place, "prompt": prompt, "num_samples": 1}
            async with gate:
                status, body = await client.post("asample", {**fields, "sampling_params": {"max_tokens": 1}})
            if status != 200:
                raise SystemExit(f"asample: {status} {body[:300]!r}")
            return client, orjson.loads(body)["request_id"]

        self._polls = list(await asyncio.gather(*map(one, range(number))))

    async def hold(self, until: asyncio.Event) -> None:
        await asyncio.gather(*(self._poll(client, request_id, until) for client, request_id in self._polls))

    async def _poll(self, client: Client, request_id: str, until: asyncio.Event) -> None:
        ended = asyncio.ensure_future(until.wait())
        while not until.is_set():
            poll = asyncio.ensure_future(insist(client, "retrieve_future", {"request_id": request_id}, until))
            await asyncio.wait({poll, ended}, return_when=asyncio.FIRST_COMPLETED)
            if poll.done():
                self.answered.append(asyncio.get_running_loop().time())
            else:
                poll.cancel()
        ended.cancel()

    def wave(self) -> int:
        """Return the most polls that were answered in one second."""
        return max(Counter(int(at) for at in self.answered).values(), default=0)

    def close(self) -> None:
        for client, _ in self._polls:
            client.close()


Figures = dict[str, float]


def quantiles(values: Sequence[float]) -> Figures:
    ordered = sorted(values)
    return {
        "p50, ms": ordered[len(ordered) // 2],
        "p99, ms": ordered[int(0.99 * (len(ordered) - 1))],
        "most, ms": ordered[-1],
    }


async def heartbeats(server: Server, number: int, polls: int, seconds: float) -> Figures:
    crowd, held, until = Crowd(server.port), Polls(server.port), asyncio.Event()
    await crowd.open(number)
    if polls:
        await held.open(polls)
    working = [asyncio.create_task(crowd.beat(until))]
    if polls:
        working.append(asyncio.create_task(held.hold(until)))
    await asyncio.sleep(WARM_UP_S)
    crowd.late_ms.clear()
    held.answered.clear()
    before_s, began = server.cpu_s(), time.monotonic()
    await asyncio.sleep(seconds)
    late, busy_s = [late for _, late in crowd.late_ms], server.cpu_s() - before_s
    took_s = time.monotonic() - began
    until.set()
    await asyncio.wait(working, timeout=60)
    wrong = {status: count for status, count in crowd.statuses.items() if status not in (200, 0)}
    if wrong:
        raise SystemExit(f"heartbeats were refused: {wrong}")
    figures = {
        **quantiles(late),
        "answered per s": len(late) / took_s,
        "server's CPU, %": 100 * busy_s / took_s,
        "CPU per heartbeat, us": 1e6 * busy_s / max(1, len(late)),
    }
    if polls:
        figures["polls answered in one s, at most"] = held.wave()
    crowd.close()
    held.close()
    return figures


async def after_a_crash(server: Server, number: int, _: int, seconds: float) -> Figures:
    """Return seconds from the start of the new server until heartbeats are answered in time again."""
    crowd, until = Crowd(server.port), asyncio.Event()
    await crowd.open(number)
    working = asyncio.create_task(crowd.beat(until))
    await asyncio.sleep(WARM_UP_S)
    server.kill()
    crowd.late_ms.clear()
    loop = asyncio.get_running_loop()
    killed_at = loop.time()
    await asyncio.to_thread(server.start)
    started_at = loop.time()
    await asyncio.sleep(max(WATCH_S, seconds))
    until.set()
    await asyncio.wait({working}, timeout=60)
    crowd.close()
    by_second: dict[int, list[float]] = {}
    for at, late in crowd.late_ms:
        by_second.setdefault(int(at - started_at), []).append(late)
    bad = [second for second, late in by_second.items() if quantiles(late)["p99, ms"] > CALM_MS]
    return {
        "answers again after, s": started_at - killed_at,
        "calm after, s": max(bad, default=-1) + 1,
        "most, ms": max(late for _, late in crowd.late_ms),
    }


Measure = Callable[[Server, int, int, float], Coroutine[Any, Any, Figures]]


def measured(measure: Measure, checkout: Path, number: int, polls: int, seconds: float) -> Figures:
    with tempfile.TemporaryDirectory() as made, Server(checkout, Path(made) / "data", engines=not polls) as server:
        return uvloop.run(measure(server, number, polls, seconds))


def main() -> None:
    exempt_loopback(os.environ)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", type=Path, help="another checkout, whose figures stand beside ours")
    parser.add_argument("--sessions", type=int, nargs="*", default=[1000, 3000, 6000, 9000])
    parser.add_argument("--polls", type=int, default=5000, help="long polls beside 1,000 sessions; 0: none")
    parser.add_argument("--crash", type=int, default=9000, help="sessions whose server is killed; 0: none")
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--rounds", type=int, default=1)
    options = parser.parse_args()
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    gc.disable()  # a collection of the clients' objects would count as the server's delay
    checkouts = {"before": options.before.resolve(), "after": HERE} if options.before else {"this checkout": HERE}
    plan: list[tuple[str, Measure, int, int]] = [
        (f"{number} sessions", heartbeats, number, 0) for number in options.sessions
    ]
    if options.polls:
        plan.append((f"1000 sessions beside {options.polls} polls", heartbeats, 1000, options.polls))
    if options.crash:
        plan.append((f"kill -9 with {options.crash} sessions", after_a_crash, options.crash, 0))
    for title, measure, number, polls in plan:
        rounds: dict[str, list[Figures]] = {name: [] for name in checkouts}
        for _ in range(options.rounds):
            for name, checkout in checkouts.items():
                rounds[name].append(measured(measure, checkout, number, polls, options.seconds))
        for name, found in rounds.items():
            figures = ", ".join(f"{key} {median(each[key] for each in found):.4g}" for key in found[0])
            print(f"{title}, {name}: {figures}", flush=True)


if __name__ == "__main__":
    main()
