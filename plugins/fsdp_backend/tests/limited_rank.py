"""A rank with little memory: an operator whose result does not fit raises what a GPU's allocator raises."""

from typing import Any

from tinsmith_fsdp.rank import Rank
from tinsmith_workbench.rehearsal.allocations import Allocations
from tinsmith_workers import Worker


class LimitedRank(Rank):
    """Counts what passes allocate, and what of that lives on after them."""

    def __init__(self, worker: Worker) -> None:
        super().__init__(worker)
        self._allocations = Allocations()

    def limit(self, room: int | None = None, fails_at: int | None = None) -> None:
        """Limit the passes from now on, in bytes; the allocation of this number, from now on, fails."""
        self._allocations.room, self._allocations.fails_at = room, fails_at
        self._allocations.number, self._allocations.peak = 0, self._allocations.taken

    def counted(self) -> tuple[int, int]:
        """Return the allocations since the limit was set, and the most bytes that lived."""
        return self._allocations.number, self._allocations.peak

    def run(self, *arguments: Any) -> Any:
        with self._allocations:
            return self._trainer.run(*arguments)  # type: ignore[union-attr]
