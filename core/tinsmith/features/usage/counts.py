"""The counts: a row for each hour, tenant and base model, added to in the transaction of each result."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import NamedTuple

from sqlalchemy import Connection
from sqlmodel import Field

from tinsmith.store import CheckpointWritten, Usage
from tinsmith.tables import Completed, Sums, TableBase, Transaction, int64, named_metadata, query, total, wanted


class Table(TableBase):
    metadata = named_metadata()


class UsageByHour(Table, table=True):
    """A tenant's usage of a base model in one hour, in UTC."""

    __tablename__ = "usage"

    hour: str = Field(primary_key=True)  # YYYY-MM-DDTHH
    tenant: str = Field(primary_key=True)
    base_model: str = Field(primary_key=True)
    trained_tokens: int = int64()
    prefilled_tokens: int = int64()
    sampled_tokens: int = int64()
    checkpoints: int = int64()
    stored_bytes: int = int64()
    engine_us: int = int64()


@dataclass(frozen=True, slots=True, kw_only=True)
class UsageRecord(Usage):
    """A tenant's usage of a base model, in one hour or in total."""

    tenant: str
    base_model: str
    hour: datetime | None = None  # its start, in UTC; None: in all
    checkpoints: int = 0  # written
    stored_bytes: int = 0  # written in checkpoints


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredCheckpoints:
    """The checkpoints that a tenant keeps, of one project or of none."""

    tenant: str
    project_id: str | None
    number: int
    num_bytes: int


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


_COUNTS = _Used._fields[3:]
_HOUR = "%Y-%m-%dT%H"
_USAGE = Sums("usage", *_COUNTS, key=_Used._fields[:3])


def count(tx: Transaction, done: Sequence[Completed]) -> None:
    for each in done:
        used, effects = each.completion.usage, each.completion.effects
        sizes = [effect.record.size_bytes for effect in effects if isinstance(effect, CheckpointWritten)]
        tokens = used.trained_tokens, used.prefilled_tokens, used.sampled_tokens
        key = tx.now.strftime(_HOUR), each.tenant, each.base_model
        tx.count(_USAGE, key, *tokens, len(sizes), sum(sizes), round(used.engine_s * 1e6))


def hourly(connection: Connection, tenant: str | None, *, first: datetime, last: datetime) -> list[UsageRecord]:
    """Return the usage by hour, from the hour of `first` to the hour of `last`, oldest first. Both times are in UTC.

    `tenant` None lists every tenant's.
    """
    of, values = wanted(tenant=tenant)
    text = f"SELECT FIELDS FROM usage WHERE hour BETWEEN :first AND :last{of} ORDER BY hour, tenant, base_model"
    rows = query(text, _Used).all(connection, first=first.strftime(_HOUR), last=last.strftime(_HOUR), **values)
    return [_record(row, datetime.strptime(row.hour, _HOUR).replace(tzinfo=UTC)) for row in rows]


def in_all(connection: Connection, tenant: str | None) -> list[UsageRecord]:
    """Return what has been used since counting began, one entry for each tenant and base model."""
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
