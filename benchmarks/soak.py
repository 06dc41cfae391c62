"""Many tenants for a long time: what a server holds must not grow with what has been done.

    python benchmarks/soak.py [--minutes 30] [--tenants 64] [--in-flight 2000]

Each tenant trains, saves a sampler, publishes it, samples from it, unpublishes and deletes it, again and again. In a
session of its own, it keeps its share of the samples in flight, which are so long that the server accepts them faster
than the engine draws them. Results are kept for two minutes instead of an hour, so that they are deleted while one
watches. Prints the memory and open files of server and engine, the rows of each table and the files on disk, sixty
times, then a verdict.

The verdict is "flat" if no figure's median in the last third of the time exceeds its median in the third before by
more than 10 % and its slack (memory 32 MB, 64 open files, 200 files, 2,000 rows), and if the median of the samples in
flight in these two thirds is at least nine tenths of what was asked for. Tables that keep a row for longer than anybody
would watch are printed, but not judged: `finished_samples` (three hours), and what lists a tenant's objects
(`sessions`, `runs`, `sampling_sessions`, `sample_counts`).
"""

import argparse
import asyncio
import json
import os
import signal
import sqlite3
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from itertools import count, islice
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import psutil

from tinsmith.loopback import exempt_loopback
from tinsmith.processes.serve import allow_many_files
from tinsmith.protocol.proto import tinker_public_pb2 as pb
from tinsmith_checkpoints.values import Json

BASE_MODEL = "toy"
RETENTION_S = 120
LOOKS = 60
START_S = 300.0
LONG_TOKENS, SHORT_TOKENS = 128, 8  # of the samples in flight, and of those from a published checkpoint
SAMPLES_OF_CHECKPOINT = 4
NOT_JUDGED = {"finished_samples", "sessions", "runs", "sampling_sessions", "sample_counts"}
SLACK = {" MB": 32.0, "open files": 64.0, "data files": 200.0, " rows": 2000.0}


# The server -----------------------------------------------------------------------------------------------------------


@dataclass
class Served:
    url: str
    data_dir: Path
    process: subprocess.Popen[bytes]
    started: dict[int, str] = field(default_factory=dict)  # pid to role

    def roles(self) -> dict[int, str]:
        children = psutil.Process(self.process.pid).children(recursive=True)
        return {self.process.pid: "server", **{child.pid: "engine" for child in children}}


def key_of(tenant: int) -> str:
    return f"tml-tenant-{tenant}"


@contextmanager
def served(directory: Path, tenants: int) -> Iterator[Served]:
    settings = {
        "server": {
            "data_dir": str(directory / "data"),
            "port": 0,
            "result_retention_s": RETENTION_S,
            "api_keys": [{"key": key_of(tenant), "tenant": f"tenant-{tenant}"} for tenant in range(tenants)],
        },
        # a place for each tenant's model, and for the one that takes its place
        "models": [{"name": BASE_MODEL, "backend": {"plugin": "toy", "max_models": 4 * tenants}}],
    }
    file = directory / "settings.yaml"
    file.write_text(json.dumps(settings))
    environ = {name: value for name, value in os.environ.items() if not name.startswith("TINSMITH_")}
    with (directory / "log").open("w") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "tinsmith", "serve", "--config", str(file)],
            env={**environ, "OMP_NUM_THREADS": "1"},
            stderr=log,
        )
    try:
        found = Served(_url_when_ready(directory, process), directory / "data", process)
        found.started = found.roles()
        yield found
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(START_S)


def _url_when_ready(directory: Path, process: subprocess.Popen[bytes]) -> str:
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline and process.poll() is None:
        try:
            url = str(json.loads((directory / "data" / "server.lock").read_text())["url"])
            if httpx.get(f"{url}/readyz").status_code == 200:
                return url
        except (OSError, ValueError, KeyError, httpx.HTTPError):
            pass
        time.sleep(0.1)  # a process starts, and nothing tells when
    raise SystemExit((directory / "log").read_text()[-4000:])


# Tenants --------------------------------------------------------------------------------------------------------------


class Tenant:
    """Trains and publishes in one task, and keeps samples in flight in another."""

    def __init__(self, url: str, number: int, samples: int, done: Counter[str]) -> None:
        self._http = httpx.AsyncClient(
            base_url=f"{url}/api/v1/",
            headers={"X-API-Key": key_of(number)},
            timeout=300,
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=8),
        )
        self._number = number
        self._samples = samples
        self._done = done

    async def live(self) -> None:
        """Until cancelled, keep the share in flight, and train in one session after the other."""
        async with self._http, asyncio.TaskGroup() as tasks:
            tasks.create_task(self._keep_in_flight())
            while True:
                await self._session()

    async def _keep_in_flight(self) -> None:
        session_id = (await self._post("create_session", {}))["session_id"]
        body = {"session_id": session_id, "sampling_session_seq_id": 0, "base_model": BASE_MODEL}
        sampler_id = (await self._post("create_sampling_session", body))["sampling_session_id"]
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._heartbeats(session_id))
            await self._sample(sampler_id, count(), LONG_TOKENS)

    async def _session(self) -> None:
        session_id = (await self._post("create_session", {}))["session_id"]
        body = {"session_id": session_id, "model_seq_id": 0, "base_model": BASE_MODEL, "lora_config": {"rank": 4}}
        created = await self._post("create_model", body)
        await self._result(created["request_id"])
        heartbeats = asyncio.create_task(self._heartbeats(session_id))
        try:
            seq_ids, samplers = count(1), count()
            for _ in range(4):
                await self._cycle(session_id, created["model_id"], seq_ids, samplers)
        finally:
            heartbeats.cancel()
        await self._post(f"sessions/{session_id}/finish", {"reason": {"type": "success"}})
        self._done["sessions"] += 1

    async def _heartbeats(self, session_id: str) -> None:
        while True:
            await self._post("session_heartbeat", {"session_id": session_id})
            await asyncio.sleep(10)

    async def _cycle(self, session_id: str, model_id: str, seq_ids: Iterator[int], samplers: Iterator[int]) -> None:
        """Train, save, publish, sample from what was published, unpublish, delete."""
        for _ in range(3):
            passed = await self._post("forward_backward", _pass(model_id, next(seq_ids)))
            step = {"model_id": model_id, "seq_id": next(seq_ids), "adam_params": {"learning_rate": 0.01}}
            stepped = await self._post("optim_step", step)
            await self._result(passed["request_id"])
            await self._result(stepped["request_id"])
        number, name = next(samplers), f"cycle-{self._done['checkpoints']}"
        saved = await self._post(
            "save_weights_for_sampler", {"model_id": model_id, "seq_id": next(seq_ids), "path": name}
        )
        path = json.loads(await self._result(saved["request_id"]))["path"]
        checkpoint = f"training_runs/{model_id}/checkpoints/sampler_weights/{name}"
        await self._post(f"{checkpoint}/publish", {})
        body = {"session_id": session_id, "sampling_session_seq_id": number, "model_path": path}
        sampler_id = (await self._post("create_sampling_session", body))["sampling_session_id"]
        await self._sample(sampler_id, iter(range(SAMPLES_OF_CHECKPOINT)), SHORT_TOKENS)
        await self._post(f"{checkpoint}/publish", {}, method="DELETE")
        await self._post(checkpoint, {}, method="DELETE")
        self._done["checkpoints"] += 1

    async def _sample(self, sampler_id: str, numbers: Iterator[int], max_tokens: int) -> None:
        """Keep the tenant's share in flight, until the numbers are used up. One poll waits for all of them."""
        waiting: set[str] = set()
        cursor, free = 0, self._samples
        while True:
            new = (self._submit(sampler_id, number, max_tokens) for number in islice(numbers, free))
            waiting |= set(await asyncio.gather(*new))
            if not waiting:
                return
            target = {"type": "sampling_session", "sampling_session_id": sampler_id}
            found = await self._post("retrieve_futures", {"target": target, "prev_cursor": cursor})
            cursor = found["cursor"]
            finished = waiting & {completion["request_id"] for completion in found["completions"]}
            waiting -= finished
            await asyncio.gather(*(self._result(request_id) for request_id in finished))
            free = len(finished)
            self._done["samples"] += free

    async def _submit(self, sampler_id: str, number: int, max_tokens: int) -> str:
        body = {
            "sampling_session_id": sampler_id,
            "seq_id": number,
            "prompt": {"chunks": [{"type": "encoded_text", "tokens": [1, 2, 3]}]},
            "sampling_params": {"max_tokens": max_tokens, "seed": number, "stop": []},
        }
        return str((await self._post("asample", body))["request_id"])

    async def _post(self, path: str, body: object, *, method: str = "POST") -> dict[str, Json]:
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        media = "application/x-protobuf" if isinstance(body, bytes) else "application/json"
        while True:
            answer = await self._http.request(method, path, content=content, headers={"Content-Type": media})
            if answer.status_code != 429:
                break
            self._done["429"] += 1
            await asyncio.sleep(float(answer.headers.get("retry-after", "1")))
        if answer.status_code != 200:
            raise RuntimeError(f"{method} {path}: {answer.status_code} {answer.text[:500]}")
        found: dict[str, Any] = answer.json()
        return found

    async def _result(self, request_id: object) -> bytes:
        while True:
            answer = await self._http.post("retrieve_future", json={"request_id": request_id})
            if answer.status_code != 408:
                break
        failed = answer.headers["content-type"].startswith("application/json") and "error" in answer.json()
        if answer.status_code != 200 or failed:
            raise RuntimeError(f"retrieve_future: {answer.status_code} {answer.text[:500]}")
        return answer.content


def _pass(model_id: str, seq_id: int) -> bytes:
    tokens = np.arange(1, 33)
    message = pb.ForwardBackwardRequest(model_id=model_id, seq_id=seq_id, loss_fn="cross_entropy")
    for _ in range(2):
        datum = message.data.add()
        datum.model_input.add().encoded_text.tokens = tokens.astype("<i4").tobytes()
        target = datum.loss_fn_inputs["target_tokens"]
        target.dense, target.dtype = tokens.astype("<i8").tobytes(), pb.DTYPE_INT64
    return bytes(message.SerializeToString())


# Figures --------------------------------------------------------------------------------------------------------------


def look(server: Served) -> dict[str, float]:
    """Return every figure by its name, which ends in its unit."""
    found: dict[str, float] = {}
    for pid, role in server.started.items():
        process = psutil.Process(pid)
        found[f"{role} MB"] = process.memory_info().rss / 1e6
        found[f"{role} open files"] = process.num_fds()
    with closing(sqlite3.connect(f"file:{server.data_dir / 'tinsmith.db'}?mode=ro", uri=True)) as connection:
        tables = [row[0] for row in connection.execute("SELECT name FROM sqlite_schema WHERE type = 'table'")]
        for table in tables:
            if not table.startswith("sqlite_"):
                [found[f"{table} rows"]] = connection.execute(f'SELECT count(*) FROM "{table}"').fetchone()
        waiting = "SELECT count(*) FROM operations WHERE NOT ordered AND state IN ('queued', 'running')"
        [found["samples in flight"]] = connection.execute(waiting).fetchone()
    found["data files"] = sum(len(names) for _, _, names in os.walk(server.data_dir))
    found["megabytes of the database"] = (server.data_dir / "tinsmith.db").stat().st_size / 1e6
    return found


def grown(looks: list[dict[str, float]]) -> list[str]:
    """Return what is not flat."""
    third = len(looks) // 3
    parts = looks[third : 2 * third], looks[2 * third :]
    found = []
    for name in looks[-1]:
        before, after = (statistics.median(each[name] for each in part) for part in parts)
        if (slack := _slack(name)) is not None and after > 1.1 * before + slack:
            found.append(f"{name}: {before:,.0f} in the second third, {after:,.0f} in the last")
    return found


def few_in_flight(looks: list[dict[str, float]], wanted: int) -> list[str]:
    """Return what is wrong with the number of samples in flight."""
    median = statistics.median(each["samples in flight"] for each in looks[len(looks) // 3 :])
    return [] if median >= 0.9 * wanted else [f"only {median:,.0f} samples in flight, of {wanted:,}"]


def _slack(name: str) -> float | None:
    """Return None for what is not judged."""
    if name.removesuffix(" rows") in NOT_JUDGED:
        return None
    return next((slack for unit, slack in SLACK.items() if name.endswith(unit)), None)


def show(seconds: float, figures: dict[str, float], done: Counter[str]) -> None:
    rows = ", ".join(f"{name.split()[0]} {value:,.0f}" for name, value in figures.items() if name.endswith("rows"))
    others = ", ".join(f"{name} {value:,.0f}" for name, value in figures.items() if not name.endswith("rows"))
    print(f"{seconds:6.0f} s  done: {dict(done)}; {others}; rows: {rows}", flush=True)


async def soak(server: Served, options: argparse.Namespace) -> list[dict[str, float]]:
    done = Counter[str]()
    share = -(-options.in_flight // options.tenants)
    living = [asyncio.create_task(Tenant(server.url, number, share, done).live()) for number in range(options.tenants)]
    looks: list[dict[str, float]] = []
    began = time.monotonic()
    while time.monotonic() - began < 60 * options.minutes:
        ended, _ = await asyncio.wait(living, timeout=60 * options.minutes / LOOKS, return_when=asyncio.FIRST_COMPLETED)
        for task in ended:
            task.result()  # raises: no tenant ends by itself
        looks.append(await asyncio.to_thread(look, server))
        show(time.monotonic() - began, looks[-1], done)
    for task in living:
        task.cancel()
    await asyncio.wait(living)
    return looks


def main() -> int:
    exempt_loopback(os.environ)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--tenants", type=int, default=64)
    parser.add_argument("--in-flight", type=int, default=2000)
    options = parser.parse_args()
    allow_many_files()
    with (
        tempfile.TemporaryDirectory(prefix="tinsmith-soak-") as directory,
        served(Path(directory), options.tenants) as server,
    ):
        looks = asyncio.run(soak(server, options))
        found = grown(looks) + few_in_flight(looks, options.in_flight)
        if server.roles() != server.started:
            found.append("a process died")
    print("\n".join(["not flat:", *found]) if found else "flat")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
