"""Recording results: first in the store, then with the observers."""

import asyncio
from collections.abc import Callable, Sequence

from tinsmith.engine.claimed import Finished
from tinsmith.engine.claims import Claims
from tinsmith.engine.store_retries import with_retries
from tinsmith.failpoints import durable_boundary
from tinsmith.hook_values import OperationFinished
from tinsmith.store import Lease, RequestStore


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
        await with_retries(self._store.complete, self._lease, [each.completion() for each in finished])
        self._claims.release(*(each.claimed.record.request_id for each in finished))
        for each in finished:
            self._on_finished(each.event(run_s, batch_size=len(finished)))
