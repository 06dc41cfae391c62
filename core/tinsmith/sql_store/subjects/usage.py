"""Tenants' usage and stored bytes.

Usage is a row for each hour, tenant and base model, added to in the transaction of each result. Each sum of what is
kept reads an index, or rows that are counted as they change.
"""

from collections import Counter, defaultdict
from datetime import UTC, datetime
from typing import NamedTuple

from sqlalchemy import Connection

from tinsmith.sql_store.statements import query, total, wanted
from tinsmith.sql_store.transaction import Sums, Transaction
from tinsmith.store import CheckpointWritten, Completion, KeptBytes, StoredCheckpoints, UsageRecord


class _Used(NamedTuple):
    """Of one hour, or without an hour in all."""

    hour: str
    tenant: str
    base_model: str
    trained_tokens: int
    prefilled_tokens: int
    sampled_tokens: int
    checkpoints: int
    stored_bytes: int
    engine_us: int


class _Size(NamedTuple):
    tenant: str
    num_bytes: int


_COUNTS = _Used._fields[3:]
_HOUR = "%Y-%m-%dT%H"
_USAGE = Sums("usage", *_COUNTS, key=_Used._fields[:3])
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


def count(tx: Transaction, tenant: str, base_model: str, completion: Completion) -> None:
    used = completion.usage
    sizes = [each.record.size_bytes for each in completion.effects if isinstance(each, CheckpointWritten)]
    tokens = used.trained_tokens, used.prefilled_tokens, used.sampled_tokens
    key = tx.now.strftime(_HOUR), tenant, base_model
    tx.count(_USAGE, key, *tokens, len(sizes), sum(sizes), round(used.engine_s * 1e6))


def hourly(connection: Connection, tenant: str | None, *, first: datetime, last: datetime) -> list[UsageRecord]:
    of, values = wanted(tenant=tenant)
    text = f"SELECT FIELDS FROM usage WHERE hour BETWEEN :first AND :last{of} ORDER BY hour, tenant, base_model"
    rows = query(text, _Used).all(connection, first=first.strftime(_HOUR), last=last.strftime(_HOUR), **values)
    return [_record(row, datetime.strptime(row.hour, _HOUR).replace(tzinfo=UTC)) for row in rows]


def in_all(connection: Connection, tenant: str | None) -> list[UsageRecord]:
    of, values = wanted(tenant=tenant)
    sums = ", ".join(f"{total(name)} AS {name}" for name in _COUNTS)
    text = f"SELECT '' AS hour, tenant, base_model, {sums} FROM usage WHERE TRUE{of} GROUP BY tenant, base_model"
    return [_record(row, None) for row in query(f"{text} ORDER BY tenant, base_model", _Used).all(connection, **values)]


def _record(row: _Used, hour: datetime | None) -> UsageRecord:
    counts = {name: getattr(row, name) for name in _COUNTS if name != "engine_us"}
    engine_s = row.engine_us / 1e6
    return UsageRecord(tenant=row.tenant, base_model=row.base_model, hour=hour, engine_s=engine_s, **counts)


def stored(connection: Connection, tenant: str | None, *, project_id: str | None = None) -> list[StoredCheckpoints]:
    """A checkpoint belongs to the project of the session that trained it; an imported one to none."""
    conditions, values = wanted(tenant=tenant, project_id=project_id)
    text = (
        f"SELECT tenant, project_id, count(*) AS number, {total('size_bytes')} AS num_bytes FROM "
        "(SELECT checkpoints.tenant, sessions.project_id, size_bytes FROM checkpoints "
        "LEFT JOIN runs ON runs.model_id = checkpoints.model_id "
        "LEFT JOIN sessions ON sessions.session_id = runs.session_id WHERE checkpoints.deleted_at IS NULL) AS kept "
        f"WHERE TRUE{conditions} GROUP BY tenant, project_id ORDER BY tenant, project_id"
    )
    return query(text, StoredCheckpoints).all(connection, **values)


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
