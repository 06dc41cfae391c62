"""What tenants have used: a row for each hour, tenant and base model, added to in the transaction of each result."""

from collections import defaultdict
from datetime import UTC, datetime

import sqlalchemy
from sqlalchemy import bindparam, func
from sqlmodel import Session

from tinsmith.sql_store.prepared import Prepared
from tinsmith.sql_store.subjects.transaction import Transaction
from tinsmith.sql_store.tables import CHECKPOINTS, KEPT, RUNS, SESSIONS, USAGE
from tinsmith.store import CheckpointWritten, Completion, StoredCheckpoints, UsageRecord

_COUNTS = ("trained_tokens", "prefilled_tokens", "sampled_tokens", "checkpoints", "stored_bytes", "engine_us")
_HOUR = "%Y-%m-%dT%H"
_ADD = Prepared(
    sqlalchemy.text(
        f"INSERT INTO usage (hour, tenant, base_model, {', '.join(_COUNTS)}) "
        f"VALUES (:hour, :tenant, :base_model, {', '.join(f':{name}' for name in _COUNTS)}) "
        "ON CONFLICT (hour, tenant, base_model) DO UPDATE SET "
        + ", ".join(f"{name} = usage.{name} + excluded.{name}" for name in _COUNTS)
    )
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
        if rows:
            _ADD.run(tx.session.connection(), *rows)


def hourly(session: Session, tenant: str | None, *, first: datetime, last: datetime) -> list[UsageRecord]:
    query = _HOURLY if tenant is None else _HOURLY.where(USAGE.c.tenant == tenant)
    hours = {"first": first.strftime(_HOUR), "last": last.strftime(_HOUR)}
    return [
        _record(row, datetime.strptime(row.hour, _HOUR).replace(tzinfo=UTC))
        for row in session.connection().execute(query, hours)
    ]


def total(session: Session, tenant: str | None) -> list[UsageRecord]:
    query = _TOTAL if tenant is None else _TOTAL.where(USAGE.c.tenant == tenant)
    return [_record(row, None) for row in session.connection().execute(query)]


def stored(session: Session, tenant: str | None, *, project_id: str | None = None) -> list[StoredCheckpoints]:
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
        for of, project, number, num_bytes in session.connection().execute(query)
    ]


def _record(row: sqlalchemy.Row[tuple[object, ...]], hour: datetime | None) -> UsageRecord:
    values = dict(row._mapping)  # noqa: SLF001 - the public name of a row's mapping
    counts = {name: int(values[name]) for name in _COUNTS}
    engine_s = counts.pop("engine_us") / 1e6
    return UsageRecord(tenant=values["tenant"], base_model=values["base_model"], hour=hour, engine_s=engine_s, **counts)
