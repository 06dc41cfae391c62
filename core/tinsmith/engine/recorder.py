"""Recording results: first in the store, then with the observers."""

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Final

from tinsmith import operations as ops
from tinsmith.engine.claimed import Finished, usage_of
from tinsmith.engine.claims import Claims
from tinsmith.engine.context import EngineContext
from tinsmith.engine.counting import count_batch
from tinsmith.engine.failures import with_retries
from tinsmith.failpoints import durable_boundary
from tinsmith.hook_values import OperationFinished
from tinsmith.store import Completion
from tinsmith.store.codec import encode_result, size_bound

_log = logging.getLogger(__name__)

MAX_TOGETHER: Final = 256  # operations


@dataclass(frozen=True, eq=False)
class _Batch:
    """What ran together, and how long it took."""

    finished: Sequence[Finished]
    run_s: float

    def completions(self) -> list[Completion]:
        used = usage_of(self.finished, self.run_s)
        return [each.completion(usage) for each, usage in zip(self.finished, used, strict=True)]

    def events(self) -> list[OperationFinished]:
        return [each.event(self.run_s, batch_size=len(self.finished)) for each in self.finished]


def _oldest(batches: Iterable[_Batch]) -> list[_Batch]:
    """Return the first batch, and those after it that fit into one transaction."""
    together: list[_Batch] = []
    for batch in batches:
        if together and sum(len(each.finished) for each in [*together, batch]) > MAX_TOGETHER:
            break
        together.append(batch)
    return together


def _verdict(ended: asyncio.Task[ops.Consistency | None]) -> ops.Consistency | None:
    return None if ended.cancelled() or ended.exception() is not None else ended.result()


class Recorder:
    def __init__(
        self,
        engine: EngineContext,
        claims: Claims,
        on_finished: Callable[[OperationFinished], None],
        *,
        most_tokens: int,
    ) -> None:
        """`most_tokens`: of a batch of passes."""
        self._store = engine.store
        self._figures = engine.figures
        self._most_tokens = most_tokens
        self._lease = engine.lease
        self._claims = claims
        self._on_finished = on_finished
        self._recording = asyncio.Lock()
        self._unrecorded: deque[_Batch] = deque()

    async def record(self, finished: Sequence[Finished], run_s: float) -> None:
        """Record results, in the order of the calls.

        Batches that were finished during one transaction share the next: if batches are shorter than transactions, as
        single samples are, nobody waits for one transaction per batch.
        """
        batch = _Batch(finished, run_s)
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
        batches = [await self._recordable_batch(each) for each in batches]
        await with_retries(
            self._store.complete, self._lease, [each for batch in batches for each in batch.completions()]
        )
        for batch in batches:
            count_batch(self._figures, batch.finished, batch.run_s, most_tokens=self._most_tokens)
            self._claims.release(*(each.claimed.record.request_id for each in batch.finished))
            for each, event in zip(batch.finished, batch.events(), strict=True):
                self._tell(event, each.outcome.comparing)

    def _tell(self, event: OperationFinished, comparing: asyncio.Task[ops.Consistency | None] | None) -> None:
        """Tell the observers; of a save whose snapshot is still being compared, when the verdict is there."""
        if comparing is None:
            self._on_finished(event)
        else:
            comparing.add_done_callback(lambda ended: self._on_finished(replace(event, consistency=_verdict(ended))))

    async def _recordable_batch(self, batch: _Batch) -> _Batch:
        return replace(batch, finished=[await self._recordable(each) for each in batch.finished])

    async def _recordable(self, finished: Finished) -> Finished:
        """Replace a result that the store cannot hold by a failure that says so. Everything else goes on."""
        outcome, limit = finished.outcome, self._store.max_value_bytes
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
