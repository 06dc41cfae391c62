"""Training: take what runs next, run it, record it.

Operations that read or write files run by themselves, and hold up only their own model.
"""

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import cast

from tinsmith import operations as ops
from tinsmith.engine.claimed import Claimed, Finished, Outcome, Stopwatch
from tinsmith.engine.context import EngineContext
from tinsmith.engine.failures import ending_the_engine
from tinsmith.engine.model_operations import ModelOperation, ModelOperations
from tinsmith.engine.models import BatchOperation, Models
from tinsmith.engine.recorder import Recorder
from tinsmith.engine.recovery_points import RecoveryPoints
from tinsmith.engine.steps import Steps, discarded
from tinsmith.failpoints import durable_boundary
from tinsmith.scheduler import Limits, Pending, Scheduler

WhyNot = Callable[[str, ops.Operation | None], ops.Failed | None]
"""Returns why an operation cannot run on a model, if so."""


class TrainingQueue:
    """Operations of models that wait. Touches neither store nor backend, so that it serves a simulation as well.

    An operation that runs by itself holds its model until `end`; other models go on.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        limits: Limits,
        why_not: WhyNot = lambda _model_id, _operation: None,
        *,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._scheduler = scheduler
        self._limits = limits
        self._why_not = why_not
        self._clock = clock
        self._memory: Mapping[str, float] = {}  # the scheduler's
        self._waiting: dict[str, Claimed] = {}  # by request_id
        self._held: set[str] = set()
        """Models with an operation that runs by itself, and those on their way to or from the disk."""

    @property
    def waiting(self) -> Mapping[str, Claimed]:
        """Operations whose turn has not come, by request_id."""
        return self._waiting

    def add(self, claimed: Claimed) -> None:
        self._waiting[claimed.record.request_id] = claimed

    def take(self) -> list[Claimed]:
        """Take what runs next: a batch, or one operation that is refused or runs by itself."""
        runnable: list[Pending] = []
        for queue in self._queues():
            head = self.checked(queue[0])
            if head.refused is not None:
                return [self._taken(head)]
            first_refused = next((n for n, each in enumerate(queue) if each.refused is not None), len(queue))
            runnable.extend(each.pending for each in queue[:first_refused])
        batch = self._scheduler.plan(runnable, limits=self._limits, now_s=self._clock(), memory=self._memory)
        self._memory = batch.memory
        return [self._taken(self._waiting[request_id]) for request_id in batch.request_ids]

    def hold(self, model_id: str) -> bool:
        """Let nothing of a model start until `end`. Return False if something of it waits, or runs by itself."""
        if model_id in self._held or any(each.record.subject_id == model_id for each in self._waiting.values()):
            return False
        self._held.add(model_id)
        return True

    def end(self, model_id: str) -> None:
        """The operation that ran by itself on this model has ended, or it need no longer be held."""
        self._held.discard(model_id)

    def checked(self, claimed: Claimed) -> Claimed:
        """Return the operation, refused if its model is not there."""
        missing = self._why_not(claimed.record.subject_id, claimed.operation)
        return claimed if missing is None else replace(claimed, refused=claimed.refused or missing)

    def _queues(self) -> list[list[Claimed]]:
        """Return what is waiting for each model that is free, in order."""
        queues: dict[str, list[Claimed]] = {}
        for each in self._waiting.values():
            if each.record.subject_id not in self._held:
                queues.setdefault(each.record.subject_id, []).append(each)
        return [sorted(queue, key=lambda each: each.record.seq_id) for queue in queues.values()]

    def _taken(self, claimed: Claimed) -> Claimed:
        del self._waiting[claimed.record.request_id]
        if not claimed.runs_in_batch:
            self._held.add(claimed.record.subject_id)
        return claimed


@dataclass(slots=True, eq=False)
class Training:
    """Takes steps until the engine stops. A step is a batch, or one operation that runs by itself."""

    engine: EngineContext
    queue: TrainingQueue
    models: Models
    steps: Steps
    operations: ModelOperations
    recovery_points: RecoveryPoints
    recorder: Recorder
    _changed: asyncio.Event = field(default_factory=asyncio.Event, init=False)  # there may be something to take

    def wake(self) -> None:
        """Look at the waiting operations, or notice that the engine should stop."""
        self._changed.set()

    async def run(self) -> None:
        """Run what is added until the engine stops."""
        stopping = self.engine.stopping
        while not stopping.is_set():
            await self._changed.wait()
            self._changed.clear()
            while not stopping.is_set() and (taken := self.queue.take()):
                await self._step(taken)

    async def run_alone(self, claimed: Claimed) -> None:
        """Run one operation and record its result, while nothing else runs."""
        await asyncio.wait([await self._step([self.queue.checked(claimed)])])

    async def _step(self, taken: Sequence[Claimed]) -> asyncio.Task[None]:
        """Run a batch, or start what runs by itself. Return when the next step may begin.

        The task that is returned ends when everything is recorded.
        """
        first = taken[0]
        if not first.runs_in_batch:
            name = f"{first.record.kind} of {first.record.subject_id}"
            return self.engine.tasks.create_task(self._run_single(first), name=name)
        stopwatch = Stopwatch()
        with ending_the_engine(first.record.base_model, f"in {first.record.kind}"):
            finished = await self._run_batch(taken)
        recorded = self.engine.tasks.create_task(self.recorder.record(finished, stopwatch.read()))
        await self.recovery_points.take_due([each.record for each in taken], recorded)
        return recorded

    async def _run_batch(self, taken: Sequence[Claimed]) -> list[Finished]:
        results = await self._discarded_steps(taken)
        running = [each for each in taken if each.record.request_id not in results]
        if running:
            found = await self.models.run_batch([cast("BatchOperation", each.operation) for each in running])
            results |= {each.record.request_id: result for each, result in zip(running, found, strict=True)}
        return [self._finished(each, _of_batch(results[each.record.request_id])) for each in taken]

    async def _discarded_steps(self, taken: Sequence[Claimed]) -> dict[str, ops.Result]:
        """Discard the steps whose window holds a failed pass: drop their gradients, and return their results."""
        found: dict[str, ops.Result] = {}
        for record in (each.record for each in taken if each.record.kind == "optim_step"):
            failed = await self.steps.failed_pass(record)
            if failed is not None:
                await self.models.drop_gradient(record.subject_id)
                found[record.request_id] = discarded(failed)
        return found

    @durable_boundary("engine.run_single")
    async def _run_single(self, claimed: Claimed) -> None:
        """The model stays held until the result is recorded: a retry must find what the store knows of its files."""
        stopwatch = Stopwatch()
        record = claimed.record
        with ending_the_engine(record.base_model, f"in {record.kind}"):
            outcome = await self._outcome(claimed)
        await self.recorder.record([self._finished(claimed, outcome)], stopwatch.read())
        await self.operations.tidy_after(claimed.operation)
        await self.recovery_points.tidy_after(record, outcome.result)
        self.queue.end(record.subject_id)
        self.wake()

    async def _outcome(self, claimed: Claimed) -> Outcome:
        if claimed.refused is not None:
            return self.operations.refuse(claimed.operation, claimed.refused)
        return await self.operations.run(cast("ModelOperation", claimed.operation), claimed.record)

    def _finished(self, claimed: Claimed, outcome: Outcome) -> Finished:
        """Note that an operation has run on its model."""
        self.recovery_points.ran(claimed.record.subject_id, claimed.record.seq_id)
        step, steps = self.steps.ran(claimed.record, outcome.result, outcome.loaded_steps)
        return Finished(claimed=claimed, outcome=outcome, step=step, steps=steps)


def _of_batch(result: ops.Result) -> Outcome:
    return Outcome(result=result, applied=isinstance(result, ops.Failed) and result.gradient_dropped)
