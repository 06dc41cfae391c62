"""What an engine holds: claimed, and not yet recorded."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from typing import Final, NamedTuple

from tinsmith.store import ClaimRoom, Held, OperationRecord

_TRAINING: Final = ClaimRoom(operations=512, num_bytes=256 << 20, reserved_bytes=2 << 20)
_SAMPLES: Final = ClaimRoom(operations=1024, num_bytes=64 << 20, reserved_bytes=1 << 20)


class _One(NamedTuple):
    tenant: str
    num_bytes: int


class Holdings:
    """Counts operations and their bytes for each tenant: those of models, and samples."""

    def __init__(self) -> None:
        self._training = _Part(_TRAINING)
        self._samples = _Part(_SAMPLES)

    @property
    def request_ids(self) -> set[str]:
        return {*self._training.held, *self._samples.held}

    @property
    def has_samples(self) -> bool:
        return bool(self._samples.held)

    @property
    def training(self) -> ClaimRoom:
        return self._training.room()

    @property
    def samples(self) -> ClaimRoom:
        return self._samples.room()

    def add(self, records: Iterable[OperationRecord]) -> None:
        for record in records:
            part = self._training if record.ordered else self._samples
            part.held[record.request_id] = _One(record.tenant, record.num_bytes)

    def remove(self, request_ids: Iterable[str]) -> None:
        for request_id in request_ids:
            self._training.held.pop(request_id, None)
            self._samples.held.pop(request_id, None)

    def clear(self) -> None:
        self._training.held.clear()
        self._samples.held.clear()


class _Part:
    def __init__(self, empty: ClaimRoom) -> None:
        self._empty = empty
        self.held: dict[str, _One] = {}  # by request_id

    def room(self) -> ClaimRoom:
        operations: Counter[str] = Counter()
        num_bytes: Counter[str] = Counter()
        for each in self.held.values():
            operations[each.tenant] += 1
            num_bytes[each.tenant] += each.num_bytes
        held = {tenant: Held(operations=number, num_bytes=num_bytes[tenant]) for tenant, number in operations.items()}
        return replace(self._empty, held=held)
