"""Which replica a sample goes to: one that may have the keys and values of its prompt, unless others are less busy."""

from collections import OrderedDict
from typing import Final, Generic, TypeVar

from tinsmith import Sample

WORTH: Final = 16  # sequences: by which a replica that began a prompt may exceed the least busy one
_TOKENS: Final = 64  # of a prompt, by which it is known; vLLM caches in blocks of 16
_MOST: Final = 4096

Location = TypeVar("Location")
Key = tuple[int, str, bytes]


class Prefixes(Generic[Location]):
    """Remembers who has read which beginning of a prompt, with which adapter, for whom. The oldest are forgotten."""

    def __init__(self) -> None:
        self._locations: OrderedDict[Key, Location] = OrderedDict()

    def location_of(self, op: Sample, adapter_id: int) -> Location | None:
        return self._locations.get(_key(op, adapter_id))

    def remember(self, op: Sample, adapter_id: int, location: Location) -> None:
        key = _key(op, adapter_id)
        self._locations[key] = location
        self._locations.move_to_end(key)
        while len(self._locations) > _MOST:
            self._locations.popitem(last=False)


def _key(op: Sample, adapter_id: int) -> Key:
    """Use what vLLM's prefix cache is keyed by, so that no choice of a replica tells what other sessions have asked."""
    return adapter_id, op.sampling_session_id, op.prompt_P[:_TOKENS].tobytes()
