"""The audit log: who did what, and when."""

from collections.abc import Mapping
from datetime import UTC, datetime

from tinsmith.memory_store.memory import Memory
from tinsmith.store import AuditEntry


def note(memory: Memory, tenant: str, event: str, by: Mapping[str, str] | None, **details: str) -> None:
    """Add an entry in the transaction that it tells of."""
    add(memory, AuditEntry(at=datetime.now(UTC), tenant=tenant, event=event, details={**details, **(by or {})}))


def add(memory: Memory, entry: AuditEntry) -> None:
    memory.audit.append(entry)


def read(
    memory: Memory,
    tenant: str | None,
    *,
    since: datetime,
    until: datetime,
    resource: str | None = None,
    limit: int,
    offset: int = 0,
) -> list[AuditEntry]:
    found = [
        each
        for each in memory.audit
        if since <= each.at < until
        and tenant in (None, each.tenant)
        and (resource is None or each.event.startswith(f"{resource}_"))
    ]
    return sorted(found, key=lambda each: each.at)[offset : offset + limit]


def prune(memory: Memory, before: datetime) -> int:
    kept = [each for each in memory.audit if each.at >= before]
    pruned = len(memory.audit) - len(kept)
    memory.audit = kept
    return pruned
