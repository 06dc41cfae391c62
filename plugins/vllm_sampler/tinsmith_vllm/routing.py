"""Which replica a sample goes to: one that may have the keys and values of its prompt, unless others are less busy."""

from collections import OrderedDict
from typing import Final, Generic, TypeVar

from tinsmith import Sample

WORTH: Final = 16  # sequences: a replica that began a prompt may have so many more to do than the least busy one
_TOKENS: Final = 64  # of a prompt, by which it is known; vLLM caches in blocks of 16
_MOST: Final = 4096

Place = TypeVar("Place")
Key = tuple[int, str, bytes]


class Prefixes(Generic[Place]):
    """Remembers who has read which beginning of a prompt, with which adapter, for whom. The oldest are forgotten."""

    def __init__(self) -> None:
        self._places: OrderedDict[Key, Place] = OrderedDict()

    def place_of(self, op: Sample, adapter_id: int) -> Place | None:
        return self._places.get(_key(op, adapter_id))

    def remember(self, op: Sample, adapter_id: int, place: Place) -> None:
        key = _key(op, adapter_id)
        self._places[key] = place
        self._places.move_to_end(key)
        while len(self._places) > _MOST:
            self._places.popitem(last=False)


def _key(op: Sample, adapter_id: int) -> Key:
    """Use what vLLM's prefix cache is keyed by, so that no choice of a replica tells what other sessions have asked."""
    return adapter_id, op.sampling_session_id, op.prompt_P[:_TOKENS].tobytes()
