"""The store, for the REST server: what tenants have used. A store may count nothing."""

from datetime import datetime

from tinsmith.store.records import KeptBytes, StoredCheckpoints, UsageRecord


class UsageLog:
    """`complete` counts each operation once, in the transaction that records its result."""

    async def hourly_usage(self, tenant: str | None, *, first: datetime, last: datetime) -> list[UsageRecord]:
        """Return what was used in the hours from that of `first` to that of `last`, oldest first.

        Both times are in UTC. `tenant` None lists every tenant's.
        """
        del tenant, first, last
        return []

    async def total_usage(self, tenant: str | None) -> list[UsageRecord]:
        """Return what has been used since counting began, one entry for each tenant and base model."""
        del tenant
        return []

    async def stored_checkpoints(self, tenant: str | None, *, project_id: str | None = None) -> list[StoredCheckpoints]:
        """Return the checkpoints kept now, one entry for each tenant and project."""
        del tenant, project_id
        return []

    async def kept_bytes(self, tenant: str | None) -> list[KeptBytes]:
        """Return how many bytes a tenant keeps; None: each tenant that keeps any, by name."""
        del tenant
        return []
