"""A rank that a test kills at a failpoint."""

from tinsmith import failpoints
from tinsmith_megatron.rank import Rank


class DoomedRank(Rank):
    def arm(self, rank: int, failpoint: str) -> None:
        """From the next call on, this failpoint acts on one of the ranks."""
        if self._worker.rank == rank:
            failpoints.arm(failpoint)
