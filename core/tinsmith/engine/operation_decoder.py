"""Decoding and checking what was claimed."""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from tinsmith import operations as ops
from tinsmith.backend import Capabilities
from tinsmith.checks import check_operation
from tinsmith.engine.claimed import Claimed, failed
from tinsmith.errors import TinsmithError
from tinsmith.losses import LossSpec
from tinsmith.store import OperationRecord
from tinsmith.store.codec import decode_operation

_LARGE_BYTES = 1 << 17  # from this size on, operations are decoded and checked outside the event loop


@dataclass(frozen=True, slots=True, kw_only=True)
class OperationDecoder:
    """Decodes what was claimed, and checks it against what trainer and sampler can do."""

    training: Capabilities
    sampling: Capabilities
    losses: Mapping[str, LossSpec]

    async def decode_all(self, records: Sequence[OperationRecord]) -> list[Claimed]:
        if sum(record.num_bytes for record in records) >= _LARGE_BYTES:
            return await asyncio.to_thread(self._decode_all, records)
        return self._decode_all(records)

    def _decode_all(self, records: Sequence[OperationRecord]) -> list[Claimed]:
        return [self._decode(record) for record in records]

    def _decode(self, record: OperationRecord) -> Claimed:
        """A bad operation is refused by itself. What is claimed no longer holds the encoded bytes."""
        assert record.payload is not None
        claimed = replace(record, payload=None)
        operation: ops.Operation | None = None
        try:
            operation = decode_operation(record.kind, record.payload)
            check_operation(operation, self.training if record.ordered else self.sampling, self.losses)
        except TinsmithError as error:
            return Claimed(
                record=claimed,
                operation=operation,
                refused=failed(error, during=f"{claimed.kind} {claimed.request_id}"),
            )
        return Claimed(record=claimed, operation=operation)
