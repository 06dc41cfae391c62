"""The ends of replicas that one sample has seen: when it is a suspect, and when it fails."""

from collections.abc import Sequence
from typing import Final

from tinsmith_vllm.deaths import Death
from tinsmith_vllm.replica import Replica

_TOGETHER: Final = 2  # deaths, after which a sample is drawn alone: the first may be a fault of the device
REPEATEDLY: Final = _TOGETHER + 1
_MAX_DEATHS: Final = REPEATEDLY + 1
_MAX_INTERRUPTIONS: Final = 3
MAX_FAILED_STARTS: Final = 3


class Ends:
    def __init__(self, replicas: Sequence[Replica]) -> None:
        self._replicas = replicas
        self.died: list[Replica] = []  # while they drew the sample, by themselves
        self._interruptions = 0
        self._began_to_wait()

    @property
    def is_suspect(self) -> bool:
        return len(self.died) >= _TOGETHER

    @property
    def own(self) -> Replica | None:
        """The replica that died over the sample, which goes to no other while it may be to blame."""
        return self.died[-1] if 0 < len(self.died) < REPEATEDLY else None

    def add(self, replica: Replica, death: Death) -> None:
        if not death.was_ready:
            return  # it is counted for all who wait: see `waited_in_vain`
        self._began_to_wait()
        if death.from_outside and self._interruptions < _MAX_INTERRUPTIONS:
            self._interruptions += 1
        else:
            self.died.append(replica)

    def _began_to_wait(self) -> None:
        self._failed_before = {replica: replica.failed_starts for replica in self._replicas}

    def waited_in_vain(self, replica: Replica) -> bool:
        """Return whether starts have failed too often since the sample began to wait, on whichever replica."""
        failed = replica.failed_starts - self._failed_before[replica]
        return not replica.is_running and failed >= MAX_FAILED_STARTS

    def are_enough(self) -> bool:
        """Return whether the sample fails. It may try one more replica, as the first may be broken itself."""
        untried = any(not each.is_gone and each not in self.died for each in self._replicas)
        return len(self.died) >= (_MAX_DEATHS if untried else REPEATEDLY)

    def __str__(self) -> str:
        return f"vllm died {len(self.died)} times over this sample"
