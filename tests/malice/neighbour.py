"""A tenant that behaves, and measures: heartbeats, one-token samples and training steps at a steady rate.

Requests are sent when their time has come, whether or not earlier ones are answered, so a server that stalls for ten
seconds delays every request of these ten seconds, and not one alone.
"""

import asyncio
import math
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

import httpx
import wire_bodies

PERIODS_S = {"heartbeat": 0.1, "sample": 0.2, "step": 0.5, "create": 2.0}
GIVE_UP_S = 60.0  # after the end of a measurement; what has not been answered by then counts as this late


@dataclass
class Measured:
    """Seconds per request, by kind; the results of the steps, bit for bit; and everything that went wrong."""

    seconds: dict[str, list[float]] = field(default_factory=dict)
    steps: dict[int, bytes] = field(default_factory=dict)
    wrong: list[str] = field(default_factory=list)

    def p99(self, kind: str) -> float:
        ordered = sorted(self.seconds[kind])
        return ordered[math.ceil(0.99 * len(ordered)) - 1]


class RefusedError(Exception):
    """An answer that a tenant within its rights must not get."""


class Neighbour:
    """Use as an async context manager."""

    def __init__(self, url: str, key: str, base_model: str) -> None:
        self._http = httpx.AsyncClient(
            base_url=f"{url}/api/v1/",
            headers={"X-API-Key": key},
            timeout=GIVE_UP_S * 5,
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=64),
        )
        self._base_model = base_model
        self._models = 0
        self._samples = 0
        self.session_id = ""
        self._sampler_id = ""

    async def __aenter__(self) -> "Neighbour":
        self.session_id = (await self._post("create_session", {}))["session_id"]
        body = {"session_id": self.session_id, "sampling_session_seq_id": 0, "base_model": self._base_model}
        self._sampler_id = (await self._post("create_sampling_session", body))["sampling_session_id"]
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._http.aclose()

    async def create_model(self, session_id: str | None = None) -> str:
        body = {
            "session_id": session_id or self.session_id,
            "model_seq_id": self._models,
            "base_model": self._base_model,
            "lora_config": {"rank": 4, "seed": 8},
        }
        self._models += 1
        created = await self._post("create_model", body)
        await self._result(created["request_id"])
        return str(created["model_id"])

    async def create_and_leave(self) -> None:
        """Create a model in a session of its own, and free its place again."""
        session_id = (await self._post("create_session", {}))["session_id"]
        await self.create_model(session_id)
        await self._post(f"sessions/{session_id}/finish", {"reason": {"type": "success"}})

    async def measure(self, until: asyncio.Event, newcomer: "Neighbour | None" = None) -> Measured:
        """Send requests until the event is set, with a new model that starts as every other one did.

        A newcomer has no model, and asks for one from time to time.
        """
        found, model_id = Measured(), await self.create_model()
        works: dict[str, Callable[[int], Awaitable[object]]] = {
            "heartbeat": lambda _: self.heartbeat(),
            "sample": lambda _: self.sample(),
            "step": lambda number: self._step(found, model_id, number),
        }
        if newcomer is not None:
            works["create"] = lambda _: newcomer.create_and_leave()
        async with asyncio.TaskGroup() as tasks:
            for kind, work in works.items():
                tasks.create_task(self._at_a_steady_rate(kind, work, found, until))
        return found

    async def _at_a_steady_rate(
        self, kind: str, work: Callable[[int], Awaitable[object]], found: Measured, until: asyncio.Event
    ) -> None:
        found.seconds[kind] = []
        began, sent = time.monotonic(), list[asyncio.Task[None]]()
        while not until.is_set():
            due = began + len(sent) * PERIODS_S[kind]
            await asyncio.sleep(due - time.monotonic())  # this is the rate, nothing is awaited
            sent.append(asyncio.create_task(self._timed(kind, work, len(sent), due, found)))
        _, late = await asyncio.wait(sent, timeout=GIVE_UP_S)
        for task in late:
            task.cancel()
        if late:
            found.wrong.append(f"{len(late)} of {len(sent)} {kind} requests were not answered in {GIVE_UP_S:.0f} s")
            found.seconds[kind] += [GIVE_UP_S] * len(late)

    async def _timed(
        self, kind: str, work: Callable[[int], Awaitable[object]], number: int, due: float, found: Measured
    ) -> None:
        try:
            await work(number)
        except (RefusedError, httpx.HTTPError) as error:
            found.wrong.append(f"{kind} {number}: {error!r}")
        found.seconds[kind].append(time.monotonic() - due)

    async def heartbeat(self) -> None:
        await self._post("session_heartbeat", {"session_id": self.session_id})

    async def sample(self) -> bytes:
        self._samples += 1
        body = wire_bodies.sample(self._sampler_id, self._samples)
        return await self._result((await self._post("asample", body))["request_id"])

    async def _step(self, found: Measured, model_id: str, number: int) -> None:
        found.steps[number] = await self.step(model_id, number)

    async def step(self, model_id: str, number: int) -> bytes:
        """Send a pass and an optimizer step, then wait for both. Return the result of the pass."""
        seq_id = 1 + 2 * number
        body = wire_bodies.forward_backward(model_id, seq_id, data=4, tokens=64, vary=number)
        passed = await self._post("forward_backward", body, wire_bodies.PROTOBUF)
        stepped = await self._post("optim_step", wire_bodies.optim_step(model_id, seq_id + 1))
        result = await self._result(passed["request_id"])
        await self._result(stepped["request_id"])
        return result

    async def _post(self, path: str, body: object, media: str = wire_bodies.JSON) -> dict[str, str]:
        if isinstance(body, bytes):
            answer = await self._http.post(path, content=body, headers={"Content-Type": media})
        else:
            answer = await self._http.post(path, json=body)
        if answer.status_code != 200:
            raise RefusedError(f"{path}: {answer.status_code} {answer.text[:300]}")
        found: dict[str, str] = answer.json()
        return found

    async def _result(self, request_id: str) -> bytes:
        while True:
            answer = await self._http.post("retrieve_future", json={"request_id": request_id})
            if answer.status_code != 408:  # 408: not yet
                break
        failed = answer.headers["content-type"].startswith("application/json") and "error" in answer.json()
        if answer.status_code != 200 or failed:
            raise RefusedError(f"retrieve_future: {answer.status_code} {answer.text[:300]}")
        return answer.content
