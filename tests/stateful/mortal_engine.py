"""A real store with real engines. Each may die before or after any call of the store, and is then restarted."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from example_databases import Databases
from plain_protocol import POISON

from tinsmith import operations as ops
from tinsmith.backend import BackendContext
from tinsmith.builtin.toy_backend import ToyBackend, ToyConfig
from tinsmith.engine.failures import EngineFailedError
from tinsmith.errors import StoreError
from tinsmith.losses import BUILTIN_LOSSES
from tinsmith.settings import QuotaSettings, RecoverySettings
from tinsmith.store import RequestStore
from tinsmith.testing.engine_driver import make_engine, take_over

LOSSES = {loss.name: loss for loss in BUILTIN_LOSSES}
_QUIET = frozenset({"wait_for_work", "wait_for_places"})  # they read and write nothing

STOP_S = 120.0
PLACES = 2  # as many as there are models, so that a further one parks one of them

How = Literal["before", "after", "unanswered"]
"""The engine dies before or after the call; or it lives, but is told that a call failed which succeeded."""


class KilledError(Exception):
    """The engine is dead: it must not catch this, and nothing from it reaches the store any more."""


@dataclass
class MortalStore:
    """The store as one engine sees it."""

    store: RequestStore
    dies_in: int | None = None  # calls
    how: How = "before"
    dead: bool = False

    def __getattr__(self, name: str) -> Any:
        if not callable(value := getattr(self.store, name)):
            return value
        return lambda *args, **kwargs: self._call(name, args, kwargs)

    async def _call(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self.dead:
            raise KilledError
        call = getattr(self.store, name)
        if name in _QUIET or self.dies_in is None:
            return await call(*args, **kwargs)
        self.dies_in -= 1
        if self.dies_in >= 0:
            return await call(*args, **kwargs)
        self.dies_in, self.dead = None, self.how != "unanswered"
        if self.how != "before":
            await asyncio.shield(call(*args, **kwargs))
        if self.dead:
            raise KilledError
        msg = "the connection was lost"
        raise StoreError(msg)


class FragileBackend(ToyBackend):
    """The toy backend. It fails if a pass contains POISON."""

    def forward_backward(self, ops: Sequence[ops.ForwardBackward]) -> Any:
        if any(POISON in datum.tokens_T for op in ops for datum in op.data):
            raise RuntimeError("poison")
        return super().forward_backward(ops)


def a_backend(kind: type[ToyBackend], cache_dir: Path, *, places: int = 64) -> ToyBackend:
    return kind(
        ToyConfig(max_models=places),
        BackendContext(model_name="toy", model_path=None, cache_dir=cache_dir, losses=LOSSES),
    )


@dataclass
class MortalEngine:
    """Starts one engine after another, as a supervisor does."""

    data_dir: Path
    databases: Databases
    store: RequestStore = field(init=False)
    backend: ToyBackend = field(init=False)
    seen: MortalStore | None = None
    task: asyncio.Task[None] | None = None
    stopping: asyncio.Event | None = None  # of the living engine
    engines: int = 0
    crashed: bool = False  # whether the last engine ended by itself
    interruptions: int = 0  # how many were killed

    async def open(self) -> None:
        self.store = self.databases.store(self.data_dir)
        await self.store.open()

    async def close(self) -> None:
        await self.kill()
        await self.store.close()

    async def restart_server(self) -> None:
        await self.close()
        await self.open()

    @property
    def alive(self) -> bool:
        return self.task is not None and not self.task.done()

    async def start(self, dies_in: int | None = None, how: How = "before") -> None:
        """Start an engine unless one is alive."""
        if self.alive:
            return
        await self._ended()
        self.engines += 1
        self.seen = MortalStore(self.store, dies_in, how)
        self.stopping = asyncio.Event()
        self.task = asyncio.create_task(self._live(self.seen, self.stopping))

    async def _live(self, seen: Any, stopping: asyncio.Event) -> None:
        self.backend = a_backend(FragileBackend, self.data_dir, places=PLACES)
        engine = await make_engine(
            seen,
            self.backend,
            self.data_dir,
            sampler=self.backend,
            lease=await take_over(self.store, "toy", engine_id=f"engine-{self.engines}"),
            resident_snapshots=2,
            recovery=RecoverySettings(point_every_operations=2, max_interruptions=1000),
            quotas=QuotaSettings(place_idle_s=0.0),
        )
        asked = asyncio.create_task(stopping.wait())  # it may have been set before the engine existed
        asked.add_done_callback(lambda _: engine.stop())
        try:
            await engine.recover("it died", lambda _what, _share: None, interrupted=not self.crashed)
            await engine.run()
        finally:
            asked.cancel()

    async def stop(self) -> None:
        """Stop the engine in order, unless something kills it first."""
        if self.alive:
            assert self.task is not None
            assert self.stopping is not None
            self.stopping.set()
            _, pending = await asyncio.wait([self.task], timeout=STOP_S)
            assert not pending, "the engine does not stop"
        await self.kill()

    async def kill(self) -> None:
        """Kill the engine: nothing that it does from here on reaches the store."""
        if self.seen is not None:
            self.seen.dead = True
        if self.alive:
            assert self.task is not None
            self.task.cancel()
            await asyncio.wait([self.task])
        await self._ended()

    async def _ended(self) -> None:
        if self.task is None:
            return
        self.crashed = False
        try:
            await self.task
        except EngineFailedError:
            self.crashed = True
        except (KilledError, asyncio.CancelledError):
            self.interruptions += 1
        self.task = None
        for writer in (self.store.connections.relaxed, self.store.connections.durable):  # type: ignore[attr-defined]  # what it handed over is committed
            await writer.write(lambda _: None)

    async def finished(self, request_id: str) -> Any:
        """Wait for an operation, restarting the engine as often as it dies."""
        async with asyncio.timeout(60):
            while True:
                await self.start()
                assert self.task is not None
                waiting = asyncio.create_task(self.store.wait_for(request_id, 60))
                await asyncio.wait([waiting, self.task], return_when=asyncio.FIRST_COMPLETED)
                if waiting.done():
                    return waiting.result()
                waiting.cancel()
                await asyncio.wait([waiting])
