"""The consistency gate: which snapshots may be sampled from. None, if the sampler does not serve what was trained.

A persisted snapshot is compared before its save is answered. The save of an ephemeral one is answered at once, and its
client may ask for samples: they are drawn together with the probes, but none is given away before the verdict, and none
at all if the snapshot is refused.

The probes would delay the next work on the devices, so they wait for the first sample of the snapshot, though not
for long. Before that, the trainer scores them only if the model is about to change.
"""

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Final

from tinsmith.backend import Snapshot
from tinsmith.engine.context import EngineContext
from tinsmith.engine.failures import ending_the_engine, with_retries
from tinsmith.engine.probes import Probes, Scoring, figures
from tinsmith.engine.snapshots import Snapshots
from tinsmith.errors import ServerError, TinsmithError
from tinsmith.operations import Consistency, Sample
from tinsmith.references import told

_log = logging.getLogger(__name__)

Comparing = asyncio.Task[Consistency | None]
"""Ends with the verdict: None if nothing is compared."""

LATEST_S: Final = 0.1  # after which a snapshot is compared even if nobody samples from it

MOST_WAITING: Final = 4  # snapshots, which stay in the sampler until they are compared


@dataclass(frozen=True, slots=True)
class _Refused:
    model_id: str
    why: str


@dataclass(frozen=True, slots=True)
class _Running:
    """A comparison that runs, or waits until it is `due`."""

    model_id: str
    due: asyncio.Event
    comparing: Comparing


@dataclass(slots=True, eq=False)
class ConsistencyGate:
    """Knows which comparisons run, and which snapshots were refused, until their model is unloaded."""

    engine: EngineContext
    probes: Probes
    snapshots: Snapshots
    most_waiting: int = MOST_WAITING  # comparisons that may wait for a sample; beyond that, the oldest begin
    _running: dict[str, _Running] = field(default_factory=dict, init=False)  # by snapshot_id, in order of their saves
    _refused: dict[str, _Refused] = field(default_factory=dict, init=False)  # by snapshot_id

    def refuses(self, found: Consistency | None) -> bool:
        """Tell whether a save with this verdict must fail."""
        refusing = self.engine.model.consistency.action == "refuse"
        return refusing and found is not None and found.verdict == "inconsistent"

    async def admit(self, model_id: str, snapshot: Snapshot) -> Consistency | None:
        """Load a snapshot and compare it with its model, which does not train meanwhile. Drop it if it is refused."""
        if (scoring := self.probes.scoring(model_id)) is not None:
            scoring.begin()  # while the trainer has the devices, before the sampler loads the snapshot
        await self.snapshots.add(snapshot, model_id=model_id)
        async with self.snapshots.use(snapshot.snapshot_id):
            found = await self.probes.compare(model_id, snapshot.snapshot_id, snapshot.lora, scoring)
        if self.refuses(found):
            await self.snapshots.discard(snapshot.snapshot_id)
        return found

    async def admit_for_now(self, model_id: str, snapshot: Snapshot) -> Comparing:
        """Load a snapshot, and compare it in the background. Its model may train at once."""
        scoring = self.probes.scoring(model_id)
        if scoring is not None and self.most_waiting == 0:
            scoring.begin()
        await self.snapshots.add(snapshot, model_id=model_id)
        due = asyncio.Event()
        comparing = self.engine.tasks.create_task(self._in_background(model_id, snapshot, scoring, due))
        self._running[snapshot.snapshot_id] = _Running(model_id, due, comparing)
        waiting = [each for each in self._running.values() if not each.due.is_set()]
        for each in waiting[: max(0, len(waiting) - self.most_waiting)]:
            each.due.set()
        comparing.add_done_callback(partial(self._ended, snapshot.snapshot_id))
        return comparing

    async def admit_again(self, model_id: str, snapshot: Snapshot) -> None:
        """Load and compare what an earlier engine had admitted. The verdict is recorded nowhere."""
        await self.snapshots.add(snapshot, model_id=model_id)
        await self._judge(model_id, snapshot)

    def _ended(self, snapshot_id: str, _comparing: Comparing) -> None:
        del self._running[snapshot_id]

    async def _in_background(
        self, model_id: str, snapshot: Snapshot, scoring: Scoring | None, due: asyncio.Event
    ) -> Consistency | None:
        with ending_the_engine(self.engine.base_model, "in the check of a snapshot"):
            return await self._judge(model_id, snapshot, scoring, due)

    async def _judge(
        self, model_id: str, snapshot: Snapshot, scoring: Scoring | None = None, due: asyncio.Event | None = None
    ) -> Consistency | None:
        """Compare a loaded snapshot once it is due, and take it back if it is refused. It stays loaded until then."""
        try:
            async with self.snapshots.use(snapshot.snapshot_id):
                if due is not None:
                    with suppress(TimeoutError):
                        async with asyncio.timeout(LATEST_S):
                            await due.wait()
                found = await self.probes.compare(model_id, snapshot.snapshot_id, snapshot.lora, scoring)
                if not self.refuses(found):
                    await self.snapshots.passed(snapshot.snapshot_id)
        except TinsmithError as error:  # it had left the sampler's memory, and cannot be read from the disk
            why = told(error, _log, during=f"the check of {snapshot.snapshot_id}").public
            found = Consistency(verdict="inconsistent", reason=why)
        if found is not None and self.refuses(found):
            why = f"sampling snapshot {snapshot.snapshot_id!r} was taken back, because {_why_refused(found)}"
            self._refused[snapshot.snapshot_id] = _Refused(model_id, why)
            await self.snapshots.discard(snapshot.snapshot_id)
            await with_retries(self.engine.store.note_run, self.engine.lease, model_id, why)
        return found

    @asynccontextmanager
    async def for_sample(self, operation: Sample) -> AsyncIterator[Sample]:
        """Yield a sample as `Snapshots.for_sample` does, and wait for the verdict on its snapshot when it is drawn.

        Before that, if it is streamed: nobody reads tokens of a snapshot that may be refused. Raise ServerError if it
        was refused.
        """
        snapshot_id = operation.snapshot_id or ""
        self._expect_not_refused(snapshot_id)
        if (running := self._running.get(snapshot_id)) is not None:
            running.due.set()
        if operation.streamed:
            await self._expect_passed(snapshot_id)
        async with self.snapshots.for_sample(operation) as versioned:
            yield versioned
        await self._expect_passed(snapshot_id)

    def _expect_not_refused(self, snapshot_id: str) -> None:
        if (refused := self._refused.get(snapshot_id)) is not None:
            raise ServerError(refused.why)

    async def _expect_passed(self, snapshot_id: str) -> None:
        if (running := self._running.get(snapshot_id)) is not None:
            await asyncio.wait([running.comparing])
        self._expect_not_refused(snapshot_id)

    async def persist(self, model_id: str) -> None:
        """Write the model's ephemeral snapshots to disk once they have passed; they are not compared again."""
        await self._ended_of(model_id)
        await self.snapshots.persist(model_id)

    async def drop_model(self, model_id: str) -> None:
        """Drop the ephemeral snapshots of a model that has been unloaded, with their verdicts."""
        await self._ended_of(model_id)
        self.probes.forget(model_id)
        self._refused = {name: each for name, each in self._refused.items() if each.model_id != model_id}
        await self.snapshots.drop_model(model_id)

    async def _ended_of(self, model_id: str) -> None:
        running = [each for each in self._running.values() if each.model_id == model_id]
        for each in running:
            each.due.set()
        if running:
            await asyncio.wait([each.comparing for each in running])


def refusal(found: Consistency) -> str:
    """Return the message of a refused save: what differs, by how much, and what to do."""
    return f"the snapshot was not saved, because {_why_refused(found)}"


def _why_refused(found: Consistency) -> str:
    return (
        f"the sampler does not serve what was trained: {found.reason} ({figures(found)}). Save again; if that fails "
        "too, restart the engine, compare the versions and dtypes of trainer and sampler, and run their contract "
        "suites; models[].consistency in the configuration sets the bound, or turns the refusal into a warning"
    )
