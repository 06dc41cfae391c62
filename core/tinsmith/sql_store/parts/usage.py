"""What tenants have used."""

from datetime import datetime

from tinsmith.sql_store.parts.connections import Connections
from tinsmith.sql_store.transactions import kept, usage
from tinsmith.store import KeptBytes, StoredCheckpoints, UsageLog, UsageRecord


class SqlUsageLog(Connections, UsageLog):
    async def hourly_usage(self, tenant: str | None, *, first: datetime, last: datetime) -> list[UsageRecord]:
        return await self._reader.read(usage.hourly, tenant, first=first, last=last)

    async def total_usage(self, tenant: str | None) -> list[UsageRecord]:
        return await self._reader.read(usage.total, tenant)

    async def stored_checkpoints(self, tenant: str | None, *, project_id: str | None = None) -> list[StoredCheckpoints]:
        return await self._reader.read(usage.stored, tenant, project_id=project_id)

    async def kept_bytes(self, tenant: str | None) -> list[KeptBytes]:
        return await self._reader.read(kept.kept, tenant)
