"""Recording results: first in the store, then with the observers."""

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import replace

from tinsmith import operations as ops
from tinsmith.engine.claimed import Finished
from tinsmith.engine.claims import Claims
from tinsmith.engine.store_retries import with_retries
from tinsmith.engine.usage import usage_of
from tinsmith.failpoints import durable_boundary
from tinsmith.hook_values import OperationFinished
from tinsmith.store import Lease, RequestStore
from tinsmith.store.codec import encode_result
from tinsmith.store.value_sizes import size_bound

_log = logging.getLogger(__name__)


class Recorder:
    def __init__(
        self, store: RequestStore, lease: Lease, claims: Claims, *, on_finished: Callable[[OperationFinished], None]
    ) -> None:
        self._store = store
        self._lease = lease
        self._claims = claims
        self._on_finished = on_finished
        self._turn = asyncio.Lock()

    async def record_in_turn(self, finished: Sequence[Finished], run_s: float) -> None:
        """Record results of models, in the order of the calls."""
        async with self._turn:
            await self.record(finished, run_s)

    @durable_boundary("engine.record")
    async def record(self, finished: Sequence[Finished], run_s: float) -> None:
        finished = [await self._recordable(each) for each in finished]
        used = usage_of(finished, run_s)
        completions = [each.completion(usage) for each, usage in zip(finished, used, strict=True)]
        await with_retries(self._store.complete, self._lease, completions)
        self._claims.release(*(each.claimed.record.request_id for each in finished))
        for each in finished:
            self._on_finished(each.event(run_s, batch_size=len(finished)))

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
