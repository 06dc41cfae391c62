"""The store, for the REST server: what is known of checkpoints. Their files are not the store's business."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection
from datetime import datetime

from tinsmith.store.records import CheckpointRecord, KeptCheckpoints


class Checkpoints(ABC):
    @abstractmethod
    async def get_checkpoint(self, path: str) -> CheckpointRecord: ...

    @abstractmethod
    async def list_checkpoints(
        self, tenant: str | None, *, model_id: str | None = None, limit: int | None = None, offset: int = 0
    ) -> tuple[list[CheckpointRecord], int]:
        """Return one page of checkpoints, newest first, and the total number of checkpoints."""

    @abstractmethod
    async def newest_checkpoints(self, model_ids: Collection[str]) -> list[CheckpointRecord]:
        """Return the newest checkpoint of each kind of each of these models."""

    @abstractmethod
    async def recorded_directories(self, paths: Collection[str]) -> set[str]:
        """Return the directories of the checkpoints that exist."""

    @abstractmethod
    async def kept_checkpoints(self, tenant: str) -> KeptCheckpoints:
        """Return how many checkpoints a tenant has, and their size."""

    @abstractmethod
    async def add_checkpoint(self, record: CheckpointRecord) -> None:
        """Record a checkpoint that no operation has written. Raise UserError if its path is taken."""

    @abstractmethod
    async def update_checkpoint(
        self, path: str, change: Callable[[CheckpointRecord], CheckpointRecord]
    ) -> CheckpointRecord:
        """Replace `public` or `expires_at` atomically. `change` may raise to refuse the update."""

    @abstractmethod
    async def delete_checkpoint(self, path: str) -> CheckpointRecord: ...

    @abstractmethod
    async def delete_version(self, read: CheckpointRecord) -> CheckpointRecord:
        """Delete a checkpoint if it is still the version that was read, with the same expiry time.

        Raise NotFoundError if it is not. All in one transaction.
        """

    @abstractmethod
    async def deleted_checkpoint(self, path: str) -> CheckpointRecord:
        """Return a checkpoint that `delete_checkpoint` has deleted, until `prune` removes its last trace."""

    @abstractmethod
    async def expired_checkpoints(self, now: datetime) -> list[CheckpointRecord]:
        """Return the checkpoints whose time to live is over."""


def is_version(found: CheckpointRecord, read: CheckpointRecord) -> bool:
    """Return whether a checkpoint is the version that was read, with the same expiry time."""
    return all(getattr(found, name) == getattr(read, name) for name in ("created_at", "directory", "expires_at"))
