"""What one engine has claimed from the log and not yet recorded."""

import asyncio
from collections.abc import Awaitable, Callable
from datetime import timedelta
from typing import Final

from tinsmith.engine.claimed import Claimed
from tinsmith.engine.holdings import Holdings
from tinsmith.engine.operation_decoder import OperationDecoder
from tinsmith.engine.store_retries import with_retries
from tinsmith.settings import RecoverySettings
from tinsmith.steady_clock import SteadyClock
from tinsmith.store import Lease, OperationRecord, RequestStore

_IDLE_S: Final = 60.0
_MANY: Final = 64  # operations; a claim of fewer has taken everything that there is room for


class Claims:
    """Takes operations from the queue, and puts back what the engine does not finish.

    `held` is what this engine knows that it has claimed. Everything else that the store counts as running under this
    lease was claimed by an earlier engine, or in a claim whose answer was lost, and goes back into the queue.
    """

    def __init__(
        self,
        store: RequestStore,
        lease: Lease,
        *,
        decoder: OperationDecoder,
        settings: RecoverySettings,
        gap_timeout_s: float,
    ) -> None:
        self._store = store
        self._lease = lease
        self._decoder = decoder
        self._settings = settings
        self._gap_timeout_s = gap_timeout_s
        self._look = asyncio.Event()
        self._held = Holdings()
        self._changed = True  # the store may have something new
        self._left_some = False  # of the last claim
        self._answer_lost = False  # of the last claim

    def wake(self) -> None:
        """There may be something to do."""
        self._look.set()

    async def woken(self) -> None:
        """Return after the next `wake`."""
        await self._look.wait()
        self._look.clear()

    async def watch_store(self) -> None:
        """Until cancelled, wake when there may be work."""
        while True:
            await self._store.wait_for_work(self._lease.base_model, _IDLE_S)
            self._changed = True
            self.wake()

    async def claim(self) -> list[Claimed]:
        """Claim what there is room for, of every tenant that has work. Ask the store only if it may have some."""
        if not (self._changed or self._left_some):
            return []
        self._changed = False
        records = await self._claim(self._claim_shares)
        if self._left_some and len(records) >= _MANY:
            self.wake()
        return await self._decoder.decode_all(records)

    async def claim_suspect(self) -> Claimed | None:
        """Claim one operation that must run alone, because it may have killed the previous engine."""
        for claimed in await self._decoder.decode_all(await self._claim(self._claim_one_alone)):
            return claimed
        return None

    async def _claim_shares(self) -> list[OperationRecord]:
        held = self._held
        claim = await self._store.claim_shares(self._lease, training=held.training, samples=held.samples)
        self._left_some = claim.left_some
        return claim.records

    async def _claim_one_alone(self) -> list[OperationRecord]:
        return await self._store.claim(self._lease, max_operations=1, alone=True)

    async def _claim(self, claim: Callable[[], Awaitable[list[OperationRecord]]]) -> list[OperationRecord]:
        records = await with_retries(self._claim_once, claim)
        self._held.add(records)
        return records

    async def _claim_once(self, claim: Callable[[], Awaitable[list[OperationRecord]]]) -> list[OperationRecord]:
        """If the answer to the last claim was lost, first put back what it may have taken."""
        if self._answer_lost:
            await self.requeue(None)
        self._answer_lost = True
        records = await claim()
        self._answer_lost = False
        return records

    async def cancelled(self) -> list[str]:
        """Return the request_ids that clients have cancelled since the last call. Only samples can be."""
        if not (self._changed and self._held.has_samples):
            return []
        return await with_retries(self._store.cancelled, self._lease)

    def release(self, *request_ids: str) -> None:
        """These are recorded or cancelled, so there is room for others."""
        self._held.remove(request_ids)
        if self._left_some:
            self.wake()

    async def requeue(self, reason: str | None, *, interrupted: bool = False) -> list[str]:
        """Put back what is not held; return the request_ids that failed instead. The store documents `reason`."""
        return await with_retries(
            self._store.requeue,
            self._lease,
            max_attempts=self._settings.max_retries + 1,
            reason=reason,
            max_interruptions=self._settings.max_interruptions if interrupted else None,
            held=self._held.request_ids,
        )

    async def requeue_all(self) -> None:
        """Put everything back, at an orderly stop."""
        self._held.clear()
        await self.requeue(None)

    async def close_gaps(self) -> None:
        """Until cancelled, fail what has waited too long behind a missing seq_id."""
        clock, timeout_s = SteadyClock(), self._gap_timeout_s
        while True:
            await asyncio.sleep(min(5.0, timeout_s / 4))
            now, steady_s = clock.read()
            if steady_s < timeout_s:
                continue  # nothing ran here for a while, so clients may have been unable to send what is missing
            older_than = now - timedelta(seconds=timeout_s)
            await with_retries(self._store.fail_gaps, self._lease.base_model, older_than=older_than)
