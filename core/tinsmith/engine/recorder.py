"""Recording results: first in the store, then with the observers."""

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from typing import Final

from tinsmith import operations as ops
from tinsmith.engine.claimed import Finished, Ran, usage_of
from tinsmith.engine.claims import Claims
from tinsmith.engine.context import EngineContext
from tinsmith.engine.failures import with_retries
from tinsmith.engine.rollouts import shows_rollouts, with_rollouts
from tinsmith.failpoints import durable_boundary
from tinsmith.figures import (
    BATCH_FILL,
    BATCH_OPERATIONS,
    OPERATION_RUN_SECONDS,
    OPERATION_SECONDS,
    PREFIX_TOKENS,
    TOKENS,
)
from tinsmith.hook_values import OperationFinished
from tinsmith.scheduler import Limits
from tinsmith.store import Usage
from tinsmith.store.codec import encode_result, size_bound
from tinsmith.tracer import BatchFinished, tell

_log = logging.getLogger(__name__)

MAX_TOGETHER: Final = 256  # operations


@dataclass(frozen=True, eq=False)
class _Batch:
    """What ran together, and how long it took."""

    finished: Sequence[Finished]
    ran: Ran

    def used(self) -> list[tuple[Finished, Usage]]:
        return list(zip(self.finished, usage_of(self.finished, self.ran.took_s), strict=True))

    def events(self, recorded_at: datetime) -> tuple[OperationFinished, ...]:
        size = len(self.finished)
        return tuple(each.event(self.ran, batch_size=size, recorded_at=recorded_at) for each in self.finished)


def _oldest(batches: Iterable[_Batch]) -> list[_Batch]:
    """Return the first batch, and those after it that fit into one transaction."""
    together: list[_Batch] = []
    for batch in batches:
        if together and sum(len(each.finished) for each in [*together, batch]) > MAX_TOGETHER:
            break
        together.append(batch)
    return together


@dataclass(slots=True, eq=False)
class Recorder:
    engine: EngineContext
    claims: Claims
    on_finished: Callable[[OperationFinished], None]
    limits: Limits  # of the trainer
    _recording: asyncio.Lock = field(default_factory=asyncio.Lock, init=False)
    _unrecorded: deque[_Batch] = field(default_factory=deque, init=False)

    def __post_init__(self) -> None:
        if self.engine.tracer is not None:
            self.engine.figures.keep_calls()

    async def record(self, finished: Sequence[Finished], ran: Ran) -> None:
        """Record results of one step, in the order of the calls.

        Batches that were finished during one transaction share the next: if batches are shorter than transactions, as
        single samples are, nobody waits for one transaction per batch.
        """
        batch = _Batch(finished, ran)
        self._unrecorded.append(batch)
        async with self._recording:
            if batch in self._unrecorded:
                await self._record_next()

    async def _record_next(self) -> None:
        """Record the oldest batch, and with it what fits. If that fails, they all stay unrecorded."""
        together = _oldest(self._unrecorded)
        await self._record(together)
        for _ in together:
            self._unrecorded.popleft()

    @durable_boundary("engine.record")
    async def _record(self, batches: Sequence[_Batch]) -> None:
        batches = [
            replace(each, finished=[await self._recordable(await self._shown(one)) for one in each.finished])
            for each in batches
        ]
        completions = [each.completion(usage, batch.ran) for batch in batches for each, usage in batch.used()]
        await with_retries(self.engine.store.complete, self.engine.lease, completions)
        recorded_at = datetime.now(UTC)
        for batch in batches:
            self._count(batch)
            self.claims.release(*(each.claimed.record.request_id for each in batch.finished))
            events = batch.events(recorded_at)
            if (tracer := self.engine.tracer) is not None:
                tell(tracer.batch_finished, self._traced(batch, events))
            for each, of_one in zip(batch.finished, events, strict=True):
                self._tell(each, of_one)

    def _traced(self, batch: _Batch, events: tuple[OperationFinished, ...]) -> BatchFinished:
        """Samplers batch for themselves, so the calls of workers belong to what is trained."""
        at, took_s, trains = batch.ran.at, batch.ran.took_s, batch.finished[0].claimed.record.ordered
        calls = self.engine.figures.calls_between(at, at + timedelta(seconds=took_s)) if trains else ()
        return BatchFinished(ran_at=at, run_s=took_s, operations=events, calls=calls)

    def _tell(self, finished: Finished, event: OperationFinished) -> None:
        """Tell the observers; of a save whose snapshot is still being compared, when the verdict is there."""

        def compared(ended: asyncio.Task[ops.Consistency | None]) -> None:
            found = None if ended.cancelled() or ended.exception() is not None else ended.result()
            self.on_finished(replace(event, consistency=found))

        if finished.outcome.comparing is None:
            self.on_finished(event)
        else:
            finished.outcome.comparing.add_done_callback(compared)

    async def _shown(self, finished: Finished) -> Finished:
        """Add what a pass of reinforcement learning shows. The device does not wait for this."""
        if not shows_rollouts(finished):
            return finished
        return await asyncio.to_thread(with_rollouts, finished, self.engine.settings.server.rollout_bytes)

    async def _recordable(self, finished: Finished) -> Finished:
        """Replace a result that the store cannot hold by a failure that says so. Everything else goes on."""
        outcome, limit = finished.outcome, self.engine.store.max_value_bytes
        if size_bound(outcome.result) <= limit:
            return finished
        _, encoded = await asyncio.to_thread(encode_result, outcome.result)
        if len(encoded) <= limit:
            return finished
        record = finished.claimed.record
        msg = (
            f"the result of this {record.kind} takes {len(encoded)} bytes, and the store of this server holds at most "
            f"{limit}, so the result is lost; ask for less in one request: fewer samples, tokens, alternatives or "
            "sequences"
        )
        _log.warning("%s: %s", record.request_id, msg)
        return replace(finished, outcome=replace(outcome, result=ops.Failed(message=msg), applied=record.ordered))

    def _count(self, batch: _Batch) -> None:
        """Count what ran together, once its results are recorded."""
        figures, now, kind = self.engine.figures, datetime.now(UTC), batch.finished[0].claimed.record.kind
        figures.observe(BATCH_OPERATIONS, len(batch.finished), kind)
        if kind in {"forward", "forward_backward"}:
            num_tokens = sum(each.claimed.record.num_tokens for each in batch.finished)
            figures.observe(BATCH_FILL, num_tokens / self.limits.max_batch_tokens)
        for each, usage in batch.used():
            record, result = each.claimed.record, each.outcome.result
            outcome = result.category if isinstance(result, ops.Failed) else "success"
            latency_s = max(0.0, (now - record.created_at).total_seconds())  # another machine's clock may be ahead
            figures.observe(OPERATION_SECONDS, latency_s, record.kind, outcome)
            figures.observe(OPERATION_RUN_SECONDS, batch.ran.took_s, record.kind)
            for of in ("trained", "prefilled", "sampled"):
                if number := getattr(usage, f"{of}_tokens"):
                    figures.count(TOKENS, number, of)
            if isinstance(result, ops.SampleOutput):
                hits = result.prompt_cache_hit_tokens
                figures.count(PREFIX_TOKENS, hits, "hit")
                figures.count(PREFIX_TOKENS, usage.prefilled_tokens - hits, "miss")
