"""The store, for the REST server: what tenants have used."""

from abc import ABC, abstractmethod
from datetime import datetime

from tinsmith.store.records import KeptBytes, StoredCheckpoints, UsageRecord


class UsageLog(ABC):
    """`complete` counts each operation once, in the transaction that records its result."""

    @abstractmethod
    async def hourly_usage(self, tenant: str | None, *, first: datetime, last: datetime) -> list[UsageRecord]:
        """Return the usage by hour, from the hour of `first` to the hour of `last`, oldest first.

        Both times are in UTC. `tenant` None lists every tenant's.
        """

    @abstractmethod
    async def total_usage(self, tenant: str | None) -> list[UsageRecord]:
        """Return what has been used since counting began, one entry for each tenant and base model."""

    @abstractmethod
    async def stored_checkpoints(self, tenant: str | None, *, project_id: str | None = None) -> list[StoredCheckpoints]:
        """Return the checkpoints kept now, one entry for each tenant and project."""

    @abstractmethod
    async def kept_bytes(self, tenant: str | None) -> list[KeptBytes]:
        """Return how many bytes a tenant keeps; None: each tenant that keeps any, by name."""
