"""The store, for the REST server: what tenants have used. A store may count nothing."""

from datetime import date

from tinsmith.store.records import StoredCheckpoints, UsageRecord


class UsageLog:
    """`complete` counts each operation once, in the transaction that records its result."""

    async def daily_usage(self, tenant: str | None, *, first: date, last: date) -> list[UsageRecord]:
        """Return what was used on these days, in UTC, oldest first. `tenant` None lists every tenant's."""
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
