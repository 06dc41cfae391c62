"""The training lane: choose a batch, run it, record the results in order.

Operations that read or write files run by themselves, and hold up only their own model.
"""

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import cast

from tinsmith.engine.claimed import Claimed, Finished, Outcome
from tinsmith.engine.failures import ending_the_engine
from tinsmith.engine.model_operations import ModelOperation, ModelOperations
from tinsmith.engine.models import BatchOperation, Models
from tinsmith.engine.recorder import Recorder
from tinsmith.engine.recovery_point_taker import RecoveryPointTaker
from tinsmith.failpoints import durable_boundary
from tinsmith.scheduler import Limits, Scheduler


class TrainingLane:
    def __init__(
        self,
        scheduler: Scheduler,
        limits: Limits,
        models: Models,
        operations: ModelOperations,
        recorder: Recorder,
        recovery_points: RecoveryPointTaker,
        tasks: asyncio.TaskGroup,
        *,
        stopping: asyncio.Event,
    ) -> None:
        self._scheduler = scheduler
        self._limits = limits
        self._models = models
        self._operations = operations
        self._recorder = recorder
        self._recovery_points = recovery_points
        self._tasks = tasks
        self._stopping = stopping
        self._memory: Mapping[str, float] = {}  # the scheduler's
        self._waiting: dict[str, Claimed] = {}  # by request_id
        self._busy: set[str] = set()  # models with an operation that runs by itself
        self._changed = asyncio.Event()  # there may be something to choose

    @property
    def waiting(self) -> Mapping[str, Claimed]:
        """Operations whose turn has not come, by request_id."""
        return self._waiting

    def add(self, claimed: Claimed) -> None:
        self._waiting[claimed.record.request_id] = claimed

    def wake(self) -> None:
        """Have the lane look at what is waiting, or notice that it should stop."""
        self._changed.set()

    async def run(self) -> None:
        """Run what is added until the engine stops."""
        while True:
            await self._changed.wait()
            self._changed.clear()
            while (chosen := self._choose()) and not self._stopping.is_set():
                if chosen[0].runs_in_batch:
                    await self._run_batch(chosen)
                else:
                    self._start_single(chosen[0])
            if self._stopping.is_set():
                return

    async def run_alone(self, claimed: Claimed) -> None:
        """Run one operation and record its result, while nothing else runs."""
        claimed = self._refused_without_model(claimed)
        if claimed.runs_in_batch:
            recorded = await self._run_batch([claimed])
            await asyncio.wait([recorded])
        else:
            await self._run_single(claimed)

    def _choose(self) -> list[Claimed]:
        """Take what runs next: a batch, or one operation that is refused or runs by itself."""
        runnable: list[Claimed] = []
        for queue in self._queues():
            head = self._refused_without_model(queue[0])
            if head.refused is not None:
                self._take(head)
                return [head]
            first_refused = next((n for n, each in enumerate(queue) if each.refused is not None), len(queue))
            runnable.extend(queue[:first_refused])
        batch = self._scheduler.plan(
            [each.as_pending() for each in runnable], limits=self._limits, now_s=time.time(), memory=self._memory
        )
        self._memory = batch.memory
        return [self._take(self._waiting[request_id]) for request_id in batch.request_ids]

    def _queues(self) -> list[list[Claimed]]:
        """Return what is waiting for each model that is not busy, in order."""
        queues: dict[str, list[Claimed]] = {}
        for each in self._waiting.values():
            if each.record.subject_id not in self._busy:
                queues.setdefault(each.record.subject_id, []).append(each)
        return [sorted(queue, key=lambda each: each.record.seq_id) for queue in queues.values()]

    def _refused_without_model(self, claimed: Claimed) -> Claimed:
        missing = self._models.why_not(claimed.record.subject_id, claimed.operation)
        return claimed if missing is None else replace(claimed, refused=claimed.refused or missing)

    def _take(self, claimed: Claimed) -> Claimed:
        del self._waiting[claimed.record.request_id]
        return claimed

    async def _run_batch(self, chosen: Sequence[Claimed]) -> asyncio.Task[None]:
        """Run a batch. Return the task that records its results, which need not end before the next batch."""
        started = time.monotonic()
        records = [each.record for each in chosen]
        with ending_the_engine(records[0].base_model, records[0].kind):
            results = await self._models.run_batch([cast("BatchOperation", each.operation) for each in chosen])
        finished = [
            Finished(claimed=each, outcome=Outcome(result=result)) for each, result in zip(chosen, results, strict=True)
        ]
        recorded = self._tasks.create_task(self._recorder.record(finished, time.monotonic() - started))
        self._recovery_points.ran(records)
        await self._recovery_points.take_due(records, recorded)
        return recorded

    def _start_single(self, claimed: Claimed) -> None:
        record = claimed.record
        self._busy.add(record.subject_id)
        self._tasks.create_task(self._run_single(claimed), name=f"{record.kind} of {record.subject_id}")

    @durable_boundary("engine.run_single")
    async def _run_single(self, claimed: Claimed) -> None:
        """The model stays busy until the result is recorded: a retry must find what the store knows of its files."""
        started = time.monotonic()
        record = claimed.record
        with ending_the_engine(record.base_model, record.kind):
            outcome = await self._outcome(claimed)
        self._recovery_points.ran([record])
        finished = Finished(claimed=claimed, outcome=outcome)
        await self._recorder.record([finished], time.monotonic() - started)
        await self._recovery_points.tidy_after(record, outcome.result)
        self._busy.discard(record.subject_id)
        self.wake()

    async def _outcome(self, claimed: Claimed) -> Outcome:
        if claimed.refused is not None:
            return self._operations.refuse(claimed.operation, claimed.refused)
        return await self._operations.run(cast("ModelOperation", claimed.operation), claimed.record)
