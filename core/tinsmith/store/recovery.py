"""The store, for a starting engine: interrupted operations, and the models to rebuild and their sources.

Methods that take a lease raise LeaseLostError, as in `engine_log`.
"""

from abc import ABC, abstractmethod
from collections.abc import Collection

from tinsmith.store.records import Lease, LiveModel, OperationRecord, RecoveryPointRecord


class Recovery(ABC):
    @abstractmethod
    async def requeue(
        self,
        lease: Lease,
        *,
        max_attempts: int,
        reason: str | None,
        max_interruptions: int | None = None,
        held: Collection[str] = (),
    ) -> list[str]:
        """Put running operations back into the queue. Return the request_ids of those that failed instead.

        `reason` describes the death of the engine before; None is an orderly stop, which counts as nothing. After a
        crash, any running operation may be its cause: operations of models, and samples with one attempt left, are
        marked to run alone. An operation that has used up `max_attempts` fails, and its model continues from the
        state before it. With `max_interruptions`, the engine was killed from outside: that counts as an interruption,
        not as an attempt. Operations in `held`, by request_id, are left running: an engine that did not receive the
        answer to a claim requeues everything else.
        """

    @abstractmethod
    async def live_models(self, base_model: str) -> list[LiveModel]:
        """Return the models that exist and are neither lost nor unloaded, oldest first."""

    @abstractmethod
    async def begin_rebuild(self, lease: Lease, model_id: str, *, interrupted: bool) -> int:
        """Count one more rebuild of the model. Return how many have begun since the last one that finished.

        With `interrupted`, the engine before was killed from outside, so the rebuild that it had begun is not counted.
        """

    @abstractmethod
    async def end_rebuild(self, lease: Lease, model_id: str) -> None:
        """Reset the count: the model is rebuilt."""

    @abstractmethod
    async def replayable(self, model_id: str, *, after_seq_id: int, limit: int) -> list[OperationRecord]:
        """Return the succeeded operations after `after_seq_id` in order, with payloads and results."""

    @abstractmethod
    async def add_recovery_point(self, lease: Lease, record: RecoveryPointRecord, *, keep: int) -> None:
        """Register a recovery point, and forget all but the newest `keep` of its model.

        Raise ServerError if the results up to its seq_id are not recorded yet, or if its model is no longer live.
        """

    @abstractmethod
    async def list_recovery_points(self, model_id: str) -> list[RecoveryPointRecord]:
        """Return the recovery points, newest first. A lost or unloaded model has none."""

    @abstractmethod
    async def drop_recovery_point(self, lease: Lease, model_id: str, seq_id: int) -> None:
        """Forget a recovery point that turned out to be damaged."""

    @abstractmethod
    async def lose_run(self, lease: Lease, model_id: str, reason: str) -> None:
        """Mark a model as lost, and fail its pending operations."""

    @abstractmethod
    async def note_run(self, lease: Lease, model_id: str, note: str) -> None:
        """Show `note` as the `state_reason` of a model that stays live."""
