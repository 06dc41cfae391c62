"""What tenants have used, and what they store.

Usage is a row for each hour, tenant and base model, added to in the transaction of each result. Each sum of what is
kept reads an index, or rows that are counted as they change.
"""

from collections import defaultdict
from datetime import UTC, datetime
from typing import Any

import sqlalchemy
from sqlalchemy import Column, Connection, Select, bindparam, func

from tinsmith.sql_store.statements import Change, insert_into
from tinsmith.sql_store.subjects.transaction import Transaction
from tinsmith.sql_store.tables import (
    CHECKPOINTS,
    KEPT,
    OPEN,
    PENDING_WORK,
    RECOVERY_POINTS,
    ROUTED_EXPERTS,
    RUNS,
    SAMPLING_SESSIONS,
    SESSIONS,
    SIZED,
    USAGE,
)
from tinsmith.store import CheckpointWritten, Completion, KeptBytes, StoredCheckpoints, UsageRecord

_COUNTS = ("trained_tokens", "prefilled_tokens", "sampled_tokens", "checkpoints", "stored_bytes", "engine_us")
_HOUR = "%Y-%m-%dT%H"
_ADD = Change(
    insert_into("usage", "hour", "tenant", "base_model", *_COUNTS)
    + " ON CONFLICT (hour, tenant, base_model) DO UPDATE SET "
    + ", ".join(f"{name} = usage.{name} + excluded.{name}" for name in _COUNTS)
)
_HOURLY = (
    sqlalchemy.select(USAGE)
    .where(USAGE.c.hour.between(bindparam("first"), bindparam("last")))
    .order_by(USAGE.c.hour, USAGE.c.tenant, USAGE.c.base_model)
)
_TOTAL = (
    sqlalchemy.select(USAGE.c.tenant, USAGE.c.base_model, *(func.sum(USAGE.c[name]).label(name) for name in _COUNTS))
    .group_by(USAGE.c.tenant, USAGE.c.base_model)
    .order_by(USAGE.c.tenant, USAGE.c.base_model)
)


_select, _sum = sqlalchemy.select, func.sum
_LOG = _select(PENDING_WORK.c.tenant, _sum(PENDING_WORK.c.stored_bytes))
_CHECKPOINTS = _select(CHECKPOINTS.c.tenant, _sum(CHECKPOINTS.c.size_bytes)).where(KEPT)
_SNAPSHOTS = (
    _select(SESSIONS.c.tenant, _sum(SAMPLING_SESSIONS.c.num_bytes))
    .join_from(SESSIONS, SAMPLING_SESSIONS, SAMPLING_SESSIONS.c.session_id == SESSIONS.c.session_id)
    .where(OPEN, SIZED)
)
_POINTS = _select(RUNS.c.tenant, _sum(RECOVERY_POINTS.c.size_bytes)).join_from(
    RECOVERY_POINTS, RUNS, RUNS.c.model_id == RECOVERY_POINTS.c.model_id
)
_EXPERTS = _select(ROUTED_EXPERTS.c.tenant, _sum(ROUTED_EXPERTS.c.num_bytes))
_METRICS = _select(RUNS.c.tenant, _sum(RUNS.c.metric_bytes)).where(RUNS.c.metric_bytes > 0)
_SUMS: dict[str, tuple[Select[Any], Column[Any]]] = {
    "log": (_LOG, PENDING_WORK.c.tenant),
    "checkpoints": (_CHECKPOINTS, CHECKPOINTS.c.tenant),
    "snapshots": (_SNAPSHOTS, SESSIONS.c.tenant),
    "recovery_points": (_POINTS, RUNS.c.tenant),
    "routed_experts": (_EXPERTS, ROUTED_EXPERTS.c.tenant),
    "metrics": (_METRICS, RUNS.c.tenant),
}


class Counting:
    """Adds up what the completions of one transaction used, and writes it in one statement."""

    def __init__(self) -> None:
        self._counts: dict[tuple[str, str], dict[str, int]] = defaultdict(lambda: dict.fromkeys(_COUNTS, 0))

    def add(self, tenant: str, base_model: str, completion: Completion) -> None:
        counts, usage = self._counts[tenant, base_model], completion.usage
        counts["trained_tokens"] += usage.trained_tokens
        counts["prefilled_tokens"] += usage.prefilled_tokens
        counts["sampled_tokens"] += usage.sampled_tokens
        counts["engine_us"] += round(usage.engine_s * 1e6)
        for effect in completion.effects:
            if isinstance(effect, CheckpointWritten):
                counts["checkpoints"] += 1
                counts["stored_bytes"] += effect.record.size_bytes

    def write(self, tx: Transaction) -> None:
        """Rows are written in one order, so that no two transactions wait for each other."""
        hour = tx.now.strftime(_HOUR)
        rows = [
            {"hour": hour, "tenant": tenant, "base_model": base_model, **counts}
            for (tenant, base_model), counts in sorted(self._counts.items())
            if any(counts.values())
        ]
        _ADD.run_each(tx.connection, rows)


def hourly(connection: Connection, tenant: str | None, *, first: datetime, last: datetime) -> list[UsageRecord]:
    query = _HOURLY if tenant is None else _HOURLY.where(USAGE.c.tenant == tenant)
    hours = {"first": first.strftime(_HOUR), "last": last.strftime(_HOUR)}
    return [
        _record(row, datetime.strptime(row.hour, _HOUR).replace(tzinfo=UTC)) for row in connection.execute(query, hours)
    ]


def total(connection: Connection, tenant: str | None) -> list[UsageRecord]:
    query = _TOTAL if tenant is None else _TOTAL.where(USAGE.c.tenant == tenant)
    return [_record(row, None) for row in connection.execute(query)]


def stored(connection: Connection, tenant: str | None, *, project_id: str | None = None) -> list[StoredCheckpoints]:
    """A checkpoint belongs to the project of the session that trained it; an imported one to none."""
    query = (
        sqlalchemy.select(CHECKPOINTS.c.tenant, SESSIONS.c.project_id, func.count(), func.sum(CHECKPOINTS.c.size_bytes))
        .join_from(CHECKPOINTS, RUNS, RUNS.c.model_id == CHECKPOINTS.c.model_id, isouter=True)
        .join(SESSIONS, SESSIONS.c.session_id == RUNS.c.session_id, isouter=True)
        .where(KEPT)
        .group_by(CHECKPOINTS.c.tenant, SESSIONS.c.project_id)
        .order_by(CHECKPOINTS.c.tenant, SESSIONS.c.project_id)
    )
    if tenant is not None:
        query = query.where(CHECKPOINTS.c.tenant == tenant)
    if project_id is not None:
        query = query.where(SESSIONS.c.project_id == project_id)
    return [
        StoredCheckpoints(tenant=of, project_id=project, number=number, num_bytes=int(num_bytes))
        for of, project, number, num_bytes in connection.execute(query)
    ]


def _record(row: sqlalchemy.Row[tuple[object, ...]], hour: datetime | None) -> UsageRecord:
    values = dict(row._mapping)  # noqa: SLF001 - the public name of a row's mapping
    counts = {name: int(values[name]) for name in _COUNTS}
    engine_s = counts.pop("engine_us") / 1e6
    return UsageRecord(tenant=values["tenant"], base_model=values["base_model"], hour=hour, engine_s=engine_s, **counts)


def kept(connection: Connection, tenant: str | None) -> list[KeptBytes]:
    """Return the bytes that each tenant stores, by name; or those of one tenant."""
    found: defaultdict[str, dict[str, int]] = defaultdict(dict)
    for what, (query, column) in _SUMS.items():
        of = query.group_by(column) if tenant is None else query.group_by(column).where(column == tenant)
        for row in connection.execute(of):
            found[row[0]][what] = int(row[1])
    return [KeptBytes(tenant=name, **sizes) for name, sizes in sorted(found.items())]
