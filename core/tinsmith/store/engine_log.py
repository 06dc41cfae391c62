"""The store, for an engine: claim operations from the log, and record their results.

Methods that take a lease raise LeaseLostError, and change nothing, once another engine has taken the lease over. A
lease that has expired but was not taken over is renewed in the same transaction.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from datetime import datetime
from typing import Final

from tinsmith.store.claim_room import Claim, ClaimRoom
from tinsmith.store.records import Completion, FailedPass, Lease, OperationRecord

PASS: Final = "forward_backward"
CLEARING: Final = ("optim_step", "load_state")
"""The kinds of operations that clear the pending gradient, if they succeed."""


class EngineLog(ABC):
    @abstractmethod
    async def claim(self, lease: Lease, *, training: ClaimRoom, samples: ClaimRoom) -> Claim:
        """Take operations that can run, as much as the rooms allow: some of every tenant that has work.

        Return at once, also if there are none. Of each model, the operations queued from `next_seq_id` on without a gap
        can run; samples always can. Of each tenant, the oldest operation is first. What this costs must depend neither
        on how much is waiting nor on what is missing.
        """

    @abstractmethod
    async def claim_suspect(self, lease: Lease) -> OperationRecord | None:
        """Take one operation that `requeue` has marked to run by itself, if there is one."""

    @abstractmethod
    async def complete(self, lease: Lease, completions: Sequence[Completion]) -> None:
        """Record results, effects and the models' applied positions in one transaction, and wake waiting calls.

        Operations that were cancelled in the meantime are skipped, and so are those that another engine has claimed. An
        operation whose effect SamplingSessionCreated finds its id taken fails, and has no effect.
        """

    @abstractmethod
    async def failed_pass(self, model_id: str, *, after_seq_id: int | None, before_seq_id: int) -> FailedPass | None:
        """Return the first forward_backward that failed between two operations of a model, for any reason.

        What `fail_gaps` has failed counts, of whichever kind: what never arrived may have been a pass. `after_seq_id`
        None: since the last operation that cleared the pending gradient, a succeeded optim_step or load_state, or the
        creation.
        """

    @abstractmethod
    async def cancelled(self, lease: Lease) -> list[str]:
        """Return the request_ids of claimed operations that were cancelled since the last call."""

    @abstractmethod
    async def fail_gaps(self, base_model: str, *, older_than: datetime) -> int:
        """Fail operations that have waited behind a missing seq_id since before `older_than`. Return how many failed.

        The error names the missing seq_id, and the model moves past it. No lease is needed: the decision depends on
        the log alone, and a model with a running operation is left as it is.
        """

    @abstractmethod
    async def wait_for_work(self, base_model: str, timeout_s: float) -> None:
        """Return when an operation may have become claimable or cancelled, or after `timeout_s`."""
