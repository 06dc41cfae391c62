"""Comparing ephemeral snapshots with their models, behind the answers to their saves.

A client has its sampling session before its snapshot has been compared, and may ask for samples at once. They are drawn
together with the probes, but none is given away before the verdict, and none at all if the snapshot is refused.

The probes would keep the devices from what comes next, so they wait for the first sample of the snapshot, though not
for long. Before that, the trainer scores them only if the model is about to change.
"""

import asyncio
import logging
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Final

from tinsmith.backend import Snapshot
from tinsmith.engine.consistency_gate import ConsistencyGate, Scoring, later_refusal
from tinsmith.engine.failures import engine_failed, with_retries
from tinsmith.engine.sampling_snapshots import Snapshots
from tinsmith.errors import ServerError, TinsmithError
from tinsmith.operations import Consistency
from tinsmith.references import told
from tinsmith.store import Lease, RequestStore

_log = logging.getLogger(__name__)

Comparing = asyncio.Task[Consistency | None]
"""Ends with the verdict: None if the gate is off."""

_LATEST_S: Final = 0.1  # after which a snapshot is compared even if nobody samples from it

MOST_WAITING: Final = 4  # snapshots, which stay in the sampler until they are compared


@dataclass(frozen=True, slots=True)
class _Refused:
    model_id: str
    why: str


@dataclass(slots=True)
class _Running:
    """A comparison that runs, or waits until it is `due`."""

    model_id: str
    due: asyncio.Event = field(default_factory=asyncio.Event)
    comparing: Comparing | None = None


class SnapshotChecks:
    """Knows which comparisons run, and which snapshots were refused, until their model is unloaded."""

    def __init__(
        self,
        store: RequestStore,
        lease: Lease,
        snapshots: Snapshots,
        gate: ConsistencyGate,
        tasks: asyncio.TaskGroup,
        *,
        most_waiting: int = MOST_WAITING,
    ) -> None:
        """`most_waiting`: how many comparisons may wait for a sample; beyond that, the oldest begin."""
        self._store = store
        self._lease = lease
        self._snapshots = snapshots
        self._gate = gate
        self._tasks = tasks
        self._running: dict[str, _Running] = {}  # by snapshot_id, in the order of their saves
        self._most_waiting = most_waiting
        self._refused: dict[str, _Refused] = {}  # by snapshot_id

    @property
    def at_once(self) -> bool:
        """Whether no comparison waits."""
        return self._most_waiting == 0

    def start(self, model_id: str, snapshot: Snapshot, scoring: Scoring | None) -> Comparing:
        """Compare a snapshot that was just loaded, in the background. Its model may train at once.

        `scoring` is what the gate's `scoring` returned.
        """
        running = _Running(model_id)
        running.comparing = comparing = self._tasks.create_task(self._in_background(running, snapshot, scoring))
        self._running[snapshot.snapshot_id] = running
        waiting = [each for each in self._running.values() if not each.due.is_set()]
        for each in waiting[: max(0, len(waiting) - self._most_waiting)]:
            each.due.set()
        comparing.add_done_callback(partial(self._ended, snapshot.snapshot_id))
        return comparing

    def _ended(self, snapshot_id: str, _comparing: Comparing) -> None:
        del self._running[snapshot_id]

    async def _in_background(
        self, running: _Running, snapshot: Snapshot, scoring: Scoring | None
    ) -> Consistency | None:
        try:
            return await self.check(running.model_id, snapshot, scoring, due=running.due)
        except TinsmithError:
            raise
        except Exception as error:
            raise engine_failed(self._lease.base_model, "the check of a snapshot", error) from error

    async def check(
        self, model_id: str, snapshot: Snapshot, scoring: Scoring | None = None, *, due: asyncio.Event | None = None
    ) -> Consistency | None:
        """Compare a loaded snapshot once it is due, and take it back if it is refused. Return None if the gate is off.

        The snapshot stays in the sampler until then.
        """
        found = await self._compare(model_id, snapshot, scoring, due)
        if found is not None and self._gate.refuses(found):
            why = later_refusal(snapshot.snapshot_id, found)
            self._refused[snapshot.snapshot_id] = _Refused(model_id, why)
            await self._snapshots.discard(snapshot.snapshot_id)
            await with_retries(self._store.note_run, self._lease, model_id, why)
        return found

    async def _compare(
        self, model_id: str, snapshot: Snapshot, scoring: Scoring | None, due: asyncio.Event | None
    ) -> Consistency | None:
        try:
            async with self._snapshots.use(snapshot.snapshot_id):
                if due is not None:
                    with suppress(TimeoutError):
                        async with asyncio.timeout(_LATEST_S):
                            await due.wait()
                return await self._gate.check(model_id, snapshot.snapshot_id, snapshot.lora, scoring)
        except TinsmithError as error:  # it had left the sampler's memory, and cannot be read from the disk
            why = told(error, _log, during=f"the check of {snapshot.snapshot_id}").public
            return Consistency(verdict="inconsistent", reason=why)

    def hurry(self, snapshot_id: str | None) -> None:
        """Somebody samples from a snapshot, and will wait for its verdict."""
        if (running := self._running.get(snapshot_id or "")) is not None:
            running.due.set()

    def expect_not_refused(self, snapshot_id: str | None) -> None:
        """Raise ServerError if a snapshot was refused."""
        refused = self._refused.get(snapshot_id or "")
        if refused is not None:
            raise ServerError(refused.why)

    async def expect_passed(self, snapshot_id: str | None) -> None:
        """Wait for the verdict on a snapshot. Raise ServerError if it was refused."""
        if (running := self._running.get(snapshot_id or "")) is not None and running.comparing is not None:
            await asyncio.wait([running.comparing])
        self.expect_not_refused(snapshot_id)

    async def persist(self, model_id: str) -> None:
        """Write the model's ephemeral snapshots to disk once they have passed; they are not compared again."""
        await self._ended_of(model_id)
        await self._snapshots.persist(model_id)

    async def drop_model(self, model_id: str) -> None:
        """Drop the ephemeral snapshots of a model that has been unloaded, and what is remembered of them."""
        await self._ended_of(model_id)
        self._gate.forget(model_id)
        self._refused = {name: each for name, each in self._refused.items() if each.model_id != model_id}
        await self._snapshots.drop_model(model_id)

    async def _ended_of(self, model_id: str) -> None:
        running = [each for each in self._running.values() if each.model_id == model_id]
        for each in running:
            each.due.set()
        if comparing := [each.comparing for each in running if each.comparing is not None]:
            await asyncio.wait(comparing)
