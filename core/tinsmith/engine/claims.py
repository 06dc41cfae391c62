"""Operations that one engine has claimed from the log and not yet recorded."""

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Final, NamedTuple

from tinsmith.checks import check_operation
from tinsmith.engine.claimed import Claimed, failed
from tinsmith.engine.context import EngineContext
from tinsmith.engine.failures import with_retries
from tinsmith.errors import TinsmithError
from tinsmith.losses import LossSpec
from tinsmith.store import ClaimRoom, EngineCapabilities, Holding, OperationRecord
from tinsmith.store.codec import decode_operation

_IDLE_S: Final = 60.0
_MANY: Final = 64  # operations; a claim of fewer has taken everything that there is room for
_LARGE_BYTES: Final = 1 << 17  # from this size on, operations are decoded and checked outside the event loop

_EMPTY: Final = {
    True: ClaimRoom(operations=512, num_bytes=256 << 20, reserved_bytes=2 << 20),
    False: ClaimRoom(operations=1024, num_bytes=64 << 20, reserved_bytes=1 << 20),
}
"""The room for operations of models, and for samples."""


class _One(NamedTuple):
    tenant: str
    num_bytes: int


class Holdings:
    """Counts what an engine holds, claimed and not yet recorded, for each tenant: operations of models, and samples."""

    def __init__(self) -> None:
        self._held: Mapping[bool, dict[str, tuple[str, int]]] = {True: {}, False: {}}
        """By `ordered` and request_id: the tenant, and bytes."""

    @property
    def request_ids(self) -> frozenset[str]:
        return frozenset((*self._held[True], *self._held[False]))

    @property
    def has_samples(self) -> bool:
        return bool(self._held[False])

    def room(self, *, ordered: bool) -> ClaimRoom:
        """Return the room for operations of models, or for samples."""
        operations, num_bytes = Counter[str](), Counter[str]()
        for tenant, size in self._held[ordered].values():
            operations[tenant] += 1
            num_bytes[tenant] += size
        held = {each: Holding(operations=number, num_bytes=num_bytes[each]) for each, number in operations.items()}
        return replace(_EMPTY[ordered], held=held)

    def add(self, records: Iterable[OperationRecord]) -> None:
        for record in records:
            self._held[record.ordered][record.request_id] = record.tenant, record.num_bytes

    def remove(self, request_ids: Iterable[str]) -> None:
        for request_id in request_ids:
            for held in self._held.values():
                held.pop(request_id, None)

    def clear(self) -> None:
        for held in self._held.values():
            held.clear()


class Claims:
    """Takes operations from the queue, and puts back what the engine does not finish.

    `held` is what this engine knows that it has claimed. Everything else that the store counts as running under this
    lease was claimed by an earlier engine, or in a claim whose answer was lost, and goes back into the queue.
    """

    def __init__(self, engine: EngineContext, capabilities: EngineCapabilities, losses: Mapping[str, LossSpec]) -> None:
        """`capabilities` and `losses` decide what is refused."""
        self._store = engine.store
        self._lease = engine.lease
        self._capabilities = capabilities
        self._losses = losses
        self._settings = engine.settings.recovery
        self._wake = asyncio.Event()
        self._held = Holdings()
        self._changed = True  # the store may have something new
        self._left_some = False  # of the last claim
        self._answer_lost = False  # of the last claim

    def wake(self) -> None:
        """There may be something to do."""
        self._wake.set()

    async def woken(self) -> None:
        """Return after the next `wake`."""
        await self._wake.wait()
        self._wake.clear()

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
        return await self._decoded(records)

    async def claim_suspect(self) -> Claimed | None:
        """Claim one operation that must run alone, because it may have killed the previous engine."""
        return next(iter(await self._decoded(await self._claim(self._claim_one_alone))), None)

    async def _claim_shares(self) -> list[OperationRecord]:
        held = self._held
        claim = await self._store.claim(self._lease, training=held.room(ordered=True), samples=held.room(ordered=False))
        self._left_some = claim.left_some
        return claim.records

    async def _claim_one_alone(self) -> list[OperationRecord]:
        suspect = await self._store.claim_suspect(self._lease)
        return [] if suspect is None else [suspect]

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

    async def _decoded(self, records: Sequence[OperationRecord]) -> list[Claimed]:
        if sum(record.num_bytes for record in records) >= _LARGE_BYTES:
            return await asyncio.to_thread(lambda: [self._decode(each) for each in records])
        return [self._decode(each) for each in records]

    def _decode(self, record: OperationRecord) -> Claimed:
        """Check against what trainer and sampler can do. A bad operation is refused by itself.

        What is claimed no longer holds the encoded bytes.
        """
        assert record.payload is not None
        operation, refused = None, None
        try:
            operation = decode_operation(record.kind, record.payload)
            check_operation(operation, self._capabilities, self._losses)
        except TinsmithError as error:
            refused = failed(error, during=f"{record.kind} {record.request_id}")
        return Claimed(record=replace(record, payload=None), operation=operation, refused=refused)

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
