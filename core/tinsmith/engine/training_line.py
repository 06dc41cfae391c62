"""What runs next on the models: a batch, or one operation by itself."""

import time
from collections.abc import Callable, Mapping
from dataclasses import replace

from tinsmith import operations as ops
from tinsmith.engine.claimed import Claimed
from tinsmith.scheduler import Limits, Pending, Scheduler

WhyNot = Callable[[str, ops.Operation | None], ops.Failed | None]
"""Returns why an operation cannot run on a model, if so."""


class TrainingLine:
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
        self._pending: dict[str, Pending] = {}  # what the scheduler sees of them
        self._held: set[str] = set()  # models with an operation that runs by itself

    @property
    def waiting(self) -> Mapping[str, Claimed]:
        """Operations whose turn has not come, by request_id."""
        return self._waiting

    def add(self, claimed: Claimed) -> None:
        self._waiting[claimed.record.request_id] = claimed
        self._pending[claimed.record.request_id] = claimed.as_pending()

    def take(self) -> list[Claimed]:
        """Take what runs next: a batch, or one operation that is refused or runs by itself."""
        runnable: list[Pending] = []
        for queue in self._queues():
            head = self.checked(queue[0])
            if head.refused is not None:
                return [self._taken(head)]
            first_refused = next((n for n, each in enumerate(queue) if each.refused is not None), len(queue))
            runnable.extend(self._pending[each.record.request_id] for each in queue[:first_refused])
        batch = self._scheduler.plan(runnable, limits=self._limits, now_s=self._clock(), memory=self._memory)
        self._memory = batch.memory
        return [self._taken(self._waiting[request_id]) for request_id in batch.request_ids]

    def end(self, model_id: str) -> None:
        """The operation that ran by itself on this model has ended."""
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
        del self._waiting[claimed.record.request_id], self._pending[claimed.record.request_id]
        if not claimed.runs_in_batch:
            self._held.add(claimed.record.subject_id)
        return claimed
