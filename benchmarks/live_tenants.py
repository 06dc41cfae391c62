"""A served toy model, and tenants that do over HTTP what a simulation's tenants do: what two benchmarks share."""

import asyncio
import json
import os
import random
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import psutil

from tinsmith.protocol.proto import tinker_public_pb2 as pb
from tinsmith_checkpoints.values import Json
from tinsmith_workbench.simulation.workload import TenantClass, Wanted, life

BASE_MODEL = "toy"
CONTEXT_TOKENS = 512
START_S = 300.0
HEARTBEAT_S = 10.0


@dataclass(frozen=True)
class Served:
    url: str
    server: psutil.Process
    database: Path

    def transactions(self) -> int:
        """Return how many claims and records there were: their operations bear the time of the transaction."""
        query = "SELECT count(DISTINCT started_at) + count(DISTINCT finished_at) FROM operations"
        with closing(sqlite3.connect(f"file:{self.database}?mode=ro", uri=True)) as connection:
            return int(connection.execute(query).fetchone()[0])

    @property
    def engine(self) -> psutil.Process:
        [engine] = [each for each in self.server.children() if "engine" in " ".join(each.cmdline())]
        return engine


@contextmanager
def served(directory: Path, tenants: int, backend: dict[str, object]) -> Iterator[Served]:
    """Run `tinsmith serve` with the toy backend, as shipped but for a key for each tenant."""
    settings = {
        "server": {
            "data_dir": str(directory / "data"),
            "port": 0,
            "api_keys": [{"key": key_of(tenant), "tenant": f"tenant{tenant}"} for tenant in range(tenants)],
        },
        "models": [{"name": BASE_MODEL, "backend": {"plugin": "toy", **backend}}],
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
        url = _url_when_ready(directory, process)
        yield Served(url, psutil.Process(process.pid), directory / "data" / "tinsmith.db")
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(START_S)


def key_of(tenant: int) -> str:
    return f"tml-tenant-{tenant}"


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


@dataclass
class Seen:
    """What the tenants of a class saw: (kind, tokens, seconds, when it ended on time.monotonic())."""

    answers: list[tuple[str, int, float, float]] = field(default_factory=list)


class LiveTenant:
    """Goes through the loop of its class, with the lengths and pauses that a simulation draws from the same seed."""

    def __init__(self, url: str, number: int, of: TenantClass, *, seed: int, max_tokens: int, seen: Seen) -> None:
        self._http = httpx.AsyncClient(
            base_url=f"{url}/api/v1/",
            headers={"X-API-Key": key_of(number)},
            timeout=300,
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=16),
        )
        self._life = life(
            of, random.Random(f"{seed}:{number}"), max_tokens=max_tokens, max_context_tokens=CONTEXT_TOKENS
        )
        self._of = of
        self._seen = seen
        self._seq_ids, self._samples = count(1), count(1)
        self._model_id = self._sampler_id = ""

    async def open(self) -> None:
        session_id = (await self._post("create_session", {}))["session_id"]
        if self._of.passes:
            body = {"session_id": session_id, "model_seq_id": 0, "base_model": BASE_MODEL, "lora_config": {"rank": 4}}
            created = await self._post("create_model", body)
            await self._result(created["request_id"])
            self._model_id = created["model_id"]
        body = {"session_id": session_id, "sampling_session_seq_id": 0, "base_model": BASE_MODEL}
        self._sampler_id = (await self._post("create_sampling_session", body))["sampling_session_id"]
        self._session_id = session_id

    async def live(self) -> None:
        """Until cancelled, think, send, and wait for results."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._heartbeats())
            for following in self._life:
                if isinstance(following, list):
                    await asyncio.gather(*(self.run(each) for each in following))
                else:
                    await asyncio.sleep(following)

    async def _heartbeats(self) -> None:
        while True:
            await asyncio.sleep(HEARTBEAT_S)
            await self._post("session_heartbeat", {"session_id": self._session_id})

    async def run(self, wanted: Wanted) -> None:
        """Ask for an operation, and wait for its result."""
        began = time.monotonic()
        submitted = await self._submit(wanted)
        await self._result(submitted["request_id"])
        ended = time.monotonic()
        tokens = wanted.tokens * max(1, wanted.sequences)
        self._seen.answers.append((wanted.kind, tokens, ended - began, ended))

    async def _submit(self, wanted: Wanted) -> dict[str, Json]:
        if wanted.kind == "forward_backward":
            return await self._post("forward_backward", _pass(self._model_id, next(self._seq_ids), wanted.tokens))
        if wanted.kind == "optim_step":
            step = {"model_id": self._model_id, "seq_id": next(self._seq_ids), "adam_params": {"learning_rate": 0.01}}
            return await self._post("optim_step", step)
        if wanted.kind == "save_for_sampler":
            seq_id = next(self._seq_ids)
            save = {"model_id": self._model_id, "seq_id": seq_id, "path": f"step{seq_id}"}
            return await self._post("save_weights_for_sampler", save)
        assert wanted.kind == "sample", wanted
        body = {
            "sampling_session_id": self._sampler_id,
            "seq_id": next(self._samples),
            "prompt": {"chunks": [{"type": "encoded_text", "tokens": [1] * wanted.prompt_tokens}]},
            "num_samples": wanted.sequences,
            "sampling_params": {"max_tokens": wanted.tokens, "seed": 1, "stop": []},
        }
        return await self._post("asample", body)

    async def _post(self, path: str, body: object) -> dict[str, Json]:
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        media = "application/x-protobuf" if isinstance(body, bytes) else "application/json"
        answer = await self._http.post(path, content=content, headers={"Content-Type": media})
        if answer.status_code != 200:
            raise RuntimeError(f"{path}: {answer.status_code} {answer.text[:500]}")
        found: dict[str, Any] = answer.json()
        return found

    async def _result(self, request_id: object) -> None:
        while True:
            answer = await self._http.post("retrieve_future", json={"request_id": request_id})
            if answer.status_code != 408:
                break
        failed = answer.headers["content-type"].startswith("application/json") and "error" in answer.json()
        if answer.status_code != 200 or failed:
            raise RuntimeError(f"retrieve_future: {answer.status_code} {answer.text[:500]}")


async def let_live(tenants: Sequence[LiveTenant], seconds: float) -> None:
    """Let opened tenants live for so long. Raise whatever one of them raises."""
    living = [asyncio.create_task(each.live()) for each in tenants]
    ended, _ = await asyncio.wait(living, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
    for task in ended:
        task.result()  # raises: no tenant ends by itself
    for task in living:
        task.cancel()
    await asyncio.wait(living)


def _pass(model_id: str, seq_id: int, num_tokens: int) -> bytes:
    """Return the body of a pass of so many tokens, in sequences as long as the context."""
    message = pb.ForwardBackwardRequest(model_id=model_id, seq_id=seq_id, loss_fn="cross_entropy")
    for start in range(0, num_tokens, CONTEXT_TOKENS):
        tokens = np.arange(min(CONTEXT_TOKENS, num_tokens - start)) % 63
        datum = message.data.add()
        datum.model_input.add().encoded_text.tokens = tokens.astype("<i4").tobytes()
        target = datum.loss_fn_inputs["target_tokens"]
        target.dense, target.dtype = tokens.astype("<i8").tobytes(), pb.DTYPE_INT64
    return bytes(message.SerializeToString())
