"""The training lane: take a batch, run it, record the results in order.

Operations that read or write files run by themselves, and hold up only their own model.
"""

import asyncio
import time
from collections.abc import Mapping, Sequence
from typing import cast

from tinsmith.engine.batches import Batches
from tinsmith.engine.claimed import Claimed, Finished, Outcome
from tinsmith.engine.failures import ending_the_engine
from tinsmith.engine.model_operations import ModelOperation, ModelOperations
from tinsmith.engine.recorder import Recorder
from tinsmith.engine.recovery_point_taker import RecoveryPointTaker
from tinsmith.engine.training_line import TrainingLine
from tinsmith.engine.windows import Windows
from tinsmith.failpoints import durable_boundary


class TrainingLane:
    def __init__(
        self,
        line: TrainingLine,
        batches: Batches,
        operations: ModelOperations,
        windows: Windows,
        recorder: Recorder,
        recovery_points: RecoveryPointTaker,
        tasks: asyncio.TaskGroup,
        *,
        stopping: asyncio.Event,
    ) -> None:
        self._line = line
        self._batches = batches
        self._operations = operations
        self._windows = windows
        self._recorder = recorder
        self._recovery_points = recovery_points
        self._tasks = tasks
        self._stopping = stopping
        self._changed = asyncio.Event()  # there may be something to choose

    @property
    def waiting(self) -> Mapping[str, Claimed]:
        """Operations whose turn has not come, by request_id."""
        return self._line.waiting

    def add(self, claimed: Claimed) -> None:
        self._line.add(claimed)

    def wake(self) -> None:
        """Have the lane look at what is waiting, or notice that it should stop."""
        self._changed.set()

    async def run(self) -> None:
        """Run what is added until the engine stops."""
        while True:
            await self._changed.wait()
            self._changed.clear()
            while (chosen := self._line.take()) and not self._stopping.is_set():
                if chosen[0].runs_in_batch:
                    await self._run_batch(chosen)
                else:
                    self._start_single(chosen[0])
            if self._stopping.is_set():
                return

    async def run_alone(self, claimed: Claimed) -> None:
        """Run one operation and record its result, while nothing else runs."""
        claimed = self._line.checked(claimed)
        if claimed.runs_in_batch:
            recorded = await self._run_batch([claimed])
            await asyncio.wait([recorded])
        else:
            await self._run_single(claimed)

    async def _run_batch(self, chosen: Sequence[Claimed]) -> asyncio.Task[None]:
        """Run a batch. Return the task that records its results, which need not end before the next batch."""
        started = time.monotonic()
        records = [each.record for each in chosen]
        with ending_the_engine(records[0].base_model, records[0].kind):
            finished = await self._batches.run(chosen)
        recorded = self._tasks.create_task(self._recorder.record(finished, time.monotonic() - started))
        self._recovery_points.ran(records)
        await self._recovery_points.take_due(records, recorded)
        return recorded

    def _start_single(self, claimed: Claimed) -> None:
        name = f"{claimed.record.kind} of {claimed.record.subject_id}"
        self._tasks.create_task(self._run_single(claimed), name=name)

    @durable_boundary("engine.run_single")
    async def _run_single(self, claimed: Claimed) -> None:
        """The model stays held until the result is recorded: a retry must find what the store knows of its files."""
        started = time.monotonic()
        record = claimed.record
        with ending_the_engine(record.base_model, record.kind):
            outcome = await self._outcome(claimed)
        self._windows.ran(record, outcome.result)
        self._recovery_points.ran([record])
        finished = Finished(claimed=claimed, outcome=outcome)
        await self._recorder.record([finished], time.monotonic() - started)
        await self._operations.tidy_after(claimed.operation)
        await self._recovery_points.tidy_after(record, outcome.result)
        self._line.end(record.subject_id)
        self.wake()

    async def _outcome(self, claimed: Claimed) -> Outcome:
        if claimed.refused is not None:
            return self._operations.refuse(claimed.operation, claimed.refused)
        return await self._operations.run(cast("ModelOperation", claimed.operation), claimed.record)
