"""Tenants' stored bytes. Each sum reads an index, or rows that are counted as they change."""

from collections import Counter, defaultdict
from typing import NamedTuple

from sqlalchemy import Connection

from tinsmith.sql_store.statements import query, total
from tinsmith.store import KeptBytes


class _Size(NamedTuple):
    tenant: str
    num_bytes: int


_SIZES = (  # kind, the tenant, the bytes of a row, and the rows
    ("log", "tenant", "stored_bytes", "pending_work WHERE TRUE"),
    ("checkpoints", "tenant", "size_bytes", "checkpoints WHERE checkpoints.deleted_at IS NULL"),
    (
        "snapshots",
        "sessions.tenant",
        "sampling_sessions.num_bytes",
        "sessions JOIN sampling_sessions ON sampling_sessions.session_id = sessions.session_id "
        "WHERE sessions.ended IS NULL AND sampling_sessions.num_bytes > 0",
    ),
    (
        "recovery_points",
        "runs.tenant",
        "recovery_points.size_bytes",
        "recovery_points JOIN runs ON runs.model_id = recovery_points.model_id WHERE TRUE",
    ),
    ("routed_experts", "tenant", "num_bytes", "routed_experts WHERE TRUE"),
    ("metrics", "tenant", "metric_bytes + rollout_bytes", "runs WHERE metric_bytes + rollout_bytes > 0"),
    ("descriptions", "tenant", "described_bytes", "sessions WHERE described_bytes > 0"),
    ("descriptions", "tenant", "described_bytes", "runs WHERE described_bytes > 0"),
)


def kept(connection: Connection, tenant: str | None) -> list[KeptBytes]:
    """Return the bytes that each tenant stores, by name; or one tenant's."""
    found: defaultdict[str, Counter[str]] = defaultdict(Counter)
    values = {} if tenant is None else {"tenant": tenant}
    for what, of, size, rows in _SIZES:
        condition = "" if tenant is None else f" AND {of} = :tenant"
        text = f"SELECT {of} AS tenant, {total(size)} AS num_bytes FROM {rows}{condition} GROUP BY {of}"
        for row in query(text, _Size).all(connection, **values):
            found[row.tenant][what] += row.num_bytes
    return [KeptBytes(tenant=name, **sizes) for name, sizes in sorted(found.items())]
