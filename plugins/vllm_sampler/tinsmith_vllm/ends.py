"""The ends of replicas that one sample has seen: when it is a suspect, and when it fails."""

from collections.abc import Sequence
from typing import Final

from tinsmith_vllm.deaths import Death
from tinsmith_vllm.replica import Replica

REPEATEDLY: Final = 2
_MAX_DEATHS: Final = 3
_MAX_INTERRUPTIONS: Final = 3
_MAX_FAILED_STARTS: Final = 3


class Ends:
    def __init__(self) -> None:
        self.died: list[Replica] = []  # while they drew the sample, by themselves
        self._interruptions = 0
        self._failed_starts = 0

    @property
    def is_suspect(self) -> bool:
        return bool(self.died)

    @property
    def own(self) -> Replica | None:
        """The replica that a suspect stays with: while it may be to blame, it goes to no other."""
        return self.died[0] if len(self.died) == 1 else None

    def add(self, replica: Replica, death: Death) -> None:
        if not death.was_ready:
            self._failed_starts += 1
        elif death.from_outside and self._interruptions < _MAX_INTERRUPTIONS:
            self._interruptions += 1
        else:
            self.died.append(replica)

    def are_enough(self, replicas: Sequence[Replica]) -> bool:
        """Return whether the sample fails. It may try one more replica, as the first may be broken itself."""
        untried = any(not each.is_gone and each not in self.died for each in replicas)
        deaths = len(self.died) >= (_MAX_DEATHS if untried else REPEATEDLY)
        return deaths or self._failed_starts >= _MAX_FAILED_STARTS

    def __str__(self) -> str:
        if self._failed_starts >= _MAX_FAILED_STARTS:
            return f"vllm did not start {self._failed_starts} times while this sample waited"
        return f"vllm died {len(self.died)} times over this sample"
