"""The tables. SQLModel declares them; `to_record` and `to_values` convert rows to and from the store's records.

Payloads and results have tables of their own, so that changing an operation's state does not rewrite its tensors.
Fields are named as in the records.
"""

from collections.abc import Mapping
from dataclasses import fields
from datetime import datetime
from typing import Any, TypeVar

from sqlalchemy import (
    JSON,
    BigInteger,
    Column,
    Connection,
    ForeignKey,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    text,
)
from sqlalchemy import Table as Table_
from sqlmodel import Field, SQLModel, UniqueConstraint

from tinsmith.operations import LoraConfig
from tinsmith.sql_store.columns import AsJson, AsText, Microseconds
from tinsmith.store import (
    ConsistencyCounts,
    DeviceTurn,
    EngineCapabilities,
    EngineFailure,
    EngineState,
    OperationState,
    RunState,
)

R = TypeVar("R")

_BigKey = BigInteger().with_variant(Integer(), "sqlite")  # SQLite generates only INTEGER keys


def _time(*, index: bool = False) -> Any:  # Any: as sqlmodel.Field itself
    return Field(sa_type=Microseconds, index=index)


def _maybe_time() -> Any:  # Any: as sqlmodel.Field itself
    return Field(default=None, sa_type=Microseconds, nullable=True)


def _json(python: Any = None, *, nullable: bool = False) -> Any:  # Any: as sqlmodel.Field itself
    kind = JSON(none_as_null=True) if python is None else AsJson(python)
    return Field(default=None, sa_column=Column(kind, nullable=nullable))


def _number(default: int = 0) -> Any:  # Any: as sqlmodel.Field itself
    return Field(default=default, sa_type=BigInteger)


class Table(SQLModel):
    """Base of the rows. Its metadata names all constraints, so that migrations can change them."""

    metadata = MetaData(
        naming_convention={
            "pk": "pk_%(table_name)s",
            "uq": "uq_%(table_name)s_%(column_0_N_name)s",
            "fk": "fk_%(table_name)s_%(column_0_N_name)s",
            "ix": "ix_%(table_name)s_%(column_0_N_name)s",
        }
    )


# As literals, because SQLite uses a partial index only if the query contains the same condition as a literal.
OPEN, LIVE, KEPT = (
    text("sessions.ended IS NULL"),
    text("runs.state IN ('creating', 'ready')"),
    text("checkpoints.deleted_at IS NULL"),
)
_OPEN, _LIVE, _KEPT = text("ended IS NULL"), text("state IN ('creating', 'ready')"), text("deleted_at IS NULL")


class SessionRow(Table, table=True):
    __tablename__ = "sessions"
    __table_args__ = (
        UniqueConstraint("tenant", "idempotency_key"),
        Index("ix_sessions_open", "tenant", sqlite_where=_OPEN, postgresql_where=_OPEN),
    )

    session_id: str = Field(primary_key=True)
    tenant: str = Field(index=True)
    idempotency_key: str | None = None
    created_at: datetime = _time(index=True)
    last_seen_at: datetime = _time(index=True)
    heard_since: datetime = _time()  # heartbeats have arrived all the time since then
    tags: tuple[str, ...] = _json(tuple[str, ...])
    user_metadata: dict[str, Any] | None = _json(nullable=True)
    sdk_version: str | None = None
    project_id: str | None = None
    display_name: str | None = None
    ended: str | None = None
    end_detail: str | None = None
    heard_by: str | None = None


class RunRow(Table, table=True):
    __tablename__ = "runs"
    __table_args__ = (
        Index("ix_runs_live", "base_model", "created_at", sqlite_where=_LIVE, postgresql_where=_LIVE),
        Index("ix_runs_live_of_tenant", "tenant", sqlite_where=_LIVE, postgresql_where=_LIVE),
    )

    model_id: str = Field(primary_key=True)
    session_id: str = Field(index=True)
    tenant: str = Field(index=True)
    base_model: str = Field(index=True)
    lora: LoraConfig = _json(LoraConfig)
    created_at: datetime = _time(index=True)
    last_request_at: datetime = _time()
    user_metadata: dict[str, Any] | None = _json(nullable=True)
    state: RunState = Field(sa_type=AsText(RunState))
    state_reason: str | None = None
    next_seq_id: int = Field(sa_type=BigInteger)
    applied_seq_id: int = Field(sa_type=BigInteger)
    arrived_seq_id: int = _number(-1)  # up to here none is missing; see `subjects/submitting.py`
    pruned_seq_id: int = _number(-1)  # the highest one that retention has removed
    unload_seq_id: int | None = Field(default=None, sa_type=BigInteger, nullable=True)  # once the session has ended
    rebuilds: int = 0  # rebuilds begun and not finished: how often an engine died in one
    steps: int = _number()
    metric_bytes: int = _number()


SIZED = text("sampling_sessions.num_bytes > 0")
_SIZED = text("num_bytes > 0")


class SamplingSessionRow(Table, table=True):
    __tablename__ = "sampling_sessions"
    __table_args__ = (
        Index("ix_sampling_sessions_sized", "session_id", "num_bytes", sqlite_where=_SIZED, postgresql_where=_SIZED),
    )

    sampling_session_id: str = Field(primary_key=True)
    session_id: str = Field(index=True)
    tenant: str
    base_model: str
    created_at: datetime = _time()
    snapshot_id: str | None = None
    model_path: str | None = None
    model_id: str | None = None
    checkpoint_created_at: datetime | None = _maybe_time()
    only_while_public: bool = False
    num_bytes: int = _number()  # of a snapshot of its own


class CheckpointRow(Table, table=True):
    __tablename__ = "checkpoints"
    __table_args__ = (
        Index("ix_checkpoints_kept", "tenant", "size_bytes", sqlite_where=_KEPT, postgresql_where=_KEPT),
        Index("ix_checkpoints_newest", "model_id", "kind", "created_at", "path"),
    )

    path: str = Field(primary_key=True)
    model_id: str
    tenant: str = Field(index=True)
    kind: str
    base_model: str
    lora: LoraConfig = _json(LoraConfig)
    created_at: datetime = _time(index=True)
    size_bytes: int = Field(sa_type=BigInteger)
    directory: str
    step: int = Field(sa_type=BigInteger)
    public: bool
    expires_at: datetime | None = Field(default=None, sa_type=Microseconds, nullable=True, index=True)
    user_metadata: dict[str, str] = _json()
    deleted_at: datetime | None = Field(default=None, sa_type=Microseconds, nullable=True)  # kept for repeated requests


RUNNING = text("operations.state = 'running'")
_QUEUED, _RUNNING, _UNTOLD = text("state = 'queued'"), text("state = 'running'"), text("NOT cancel_told")
_EARLY, _ALONE = text("state = 'queued' AND early"), text("state = 'queued' AND alone")


class OperationRow(Table, table=True):
    __tablename__ = "operations"
    __table_args__ = (
        UniqueConstraint("subject_id", "seq_id"),
        Index(
            "ix_operations_queued",
            "base_model",
            "early",
            "ordered",
            "tenant",
            "arrival",
            "seq_id",
            sqlite_where=_QUEUED,
            postgresql_where=_QUEUED,
        ),
        Index(
            "ix_operations_early",
            "base_model",
            "subject_id",
            "created_at",
            sqlite_where=_EARLY,
            postgresql_where=_EARLY,
        ),
        Index("ix_operations_alone", "base_model", "id", sqlite_where=_ALONE, postgresql_where=_ALONE),
        Index("ix_operations_running", "base_model", "id", sqlite_where=_RUNNING, postgresql_where=_RUNNING),
        Index("ix_operations_untold", "base_model", sqlite_where=_UNTOLD, postgresql_where=_UNTOLD),
        {"sqlite_autoincrement": True},
    )

    id: int | None = Field(default=None, sa_column=Column(_BigKey, primary_key=True))  # the order of arrival
    request_id: str = Field(unique=True)
    base_model: str
    kind: str
    tenant: str
    session_id: str
    subject_id: str
    seq_id: int = Field(sa_type=BigInteger)
    ordered: bool
    early: bool = False  # a lower seq_id of its model is missing
    arrival: int = (
        _number()
    )  # orders what a tenant has waiting: ids as they arrived, but never against the order of a model
    num_tokens: int = Field(sa_type=BigInteger)
    num_bytes: int = _number()  # once decoded
    payload_bytes: int = _number()  # as stored
    digest: bytes = Field(sa_type=LargeBinary)
    state: OperationState = Field(sa_type=AsText(OperationState))
    created_at: datetime = _time()
    started_at: datetime | None = _maybe_time()
    finished_at: datetime | None = Field(default=None, sa_type=Microseconds, nullable=True, index=True)
    engine_id: str | None = None  # the engine that claimed it
    attempts: int = 0  # how often it was claimed, without orderly stops and interruptions
    interruptions: int = 0  # how often its engine was killed from outside
    alone: bool = False  # an engine died while it ran, so the next attempt runs by itself
    cancel_told: bool = True  # False: its engine does not know yet that it was cancelled


def _operation_key() -> Any:  # Any: as sqlmodel.Field itself
    key = Column(_BigKey, ForeignKey("operations.id", ondelete="CASCADE"), primary_key=True, autoincrement=False)
    return Field(sa_column=key)


class PayloadRow(Table, table=True):
    __tablename__ = "payloads"

    operation_id: int = _operation_key()
    payload: bytes = Field(sa_type=LargeBinary)


class ResultRow(Table, table=True):
    __tablename__ = "results"

    operation_id: int = _operation_key()
    result_kind: str
    result: bytes = Field(sa_type=LargeBinary)


class FinishedSampleRow(Table, table=True):
    """The number of a finished sample among the samples of its client."""

    __tablename__ = "finished_samples"

    subject_id: str = Field(primary_key=True)
    clone: int = Field(sa_column=Column(BigInteger, primary_key=True, autoincrement=False))
    number: int = Field(sa_column=Column(BigInteger, primary_key=True, autoincrement=False))  # from 1
    request_id: str
    succeeded: bool
    size_bytes: int = Field(sa_type=BigInteger)
    finished_at: datetime = _time(index=True)


class SampleCountRow(Table, table=True):
    """The last number used in `finished_samples`, for each client."""

    __tablename__ = "sample_counts"

    subject_id: str = Field(primary_key=True)
    clone: int = Field(sa_column=Column(BigInteger, primary_key=True, autoincrement=False))
    last: int = Field(sa_type=BigInteger)


class PendingWorkRow(Table, table=True):
    """The operations that have ever arrived, or finished; and the size of their payloads.

    `stored_bytes` summed over a tenant's rows is the size of the payloads and results that it has in the log.
    """

    __tablename__ = "pending_work"

    tenant: str = Field(primary_key=True)
    kind: str = Field(primary_key=True)
    finished: bool = Field(primary_key=True)
    number: int = Field(sa_type=BigInteger)
    num_bytes: int = Field(sa_type=BigInteger)
    stored_bytes: int = _number()


class EngineRow(Table, table=True):
    __tablename__ = "engines"

    base_model: str = Field(primary_key=True)
    state: EngineState = Field(sa_type=AsText(EngineState))
    updated_at: datetime = _time()
    detail: str
    progress: float | None = None
    engine_id: str | None = None
    pid: int | None = None
    restarts: int
    capabilities: EngineCapabilities | None = _json(EngineCapabilities, nullable=True)
    consistency: ConsistencyCounts | None = _json(ConsistencyCounts, nullable=True)
    turn: DeviceTurn | None = _json(DeviceTurn, nullable=True)
    sampler_trouble: str | None = None
    failure: EngineFailure | None = _json(EngineFailure, nullable=True)


class LeaseRow(Table, table=True):
    """Never deleted, because the epoch must never start again."""

    __tablename__ = "leases"

    base_model: str = Field(primary_key=True)
    epoch: int = Field(sa_type=BigInteger)
    engine_id: str | None = None  # None: released
    expires_at: datetime = _time()


class RecoveryPointRow(Table, table=True):
    __tablename__ = "recovery_points"

    model_id: str = Field(primary_key=True)
    seq_id: int = Field(sa_column=Column(BigInteger, primary_key=True, autoincrement=False))
    directory: str
    size_bytes: int = Field(sa_type=BigInteger)
    created_at: datetime = _time()


class UsageRow(Table, table=True):
    """What a tenant has used of a base model in one hour, in UTC."""

    __tablename__ = "usage"

    hour: str = Field(primary_key=True)  # YYYY-MM-DDTHH
    tenant: str = Field(primary_key=True)
    base_model: str = Field(primary_key=True)
    trained_tokens: int = Field(sa_type=BigInteger)
    prefilled_tokens: int = Field(sa_type=BigInteger)
    sampled_tokens: int = Field(sa_type=BigInteger)
    checkpoints: int = Field(sa_type=BigInteger)
    stored_bytes: int = Field(sa_type=BigInteger)
    engine_us: int = Field(sa_type=BigInteger)


class RoutedExpertsRow(Table, table=True):
    """The experts of a sequence that a tenant sampled from a model, by the digest of its tokens, in order of age."""

    __tablename__ = "routed_experts"
    __table_args__ = (
        UniqueConstraint("tenant", "model_id", "digest"),
        Index("ix_routed_experts_tenant_id_num_bytes", "tenant", "id", "num_bytes"),
    )

    id: int | None = Field(default=None, sa_column=Column(_BigKey, primary_key=True))
    tenant: str
    model_id: str
    digest: bytes = Field(sa_type=LargeBinary)
    num_bytes: int = _number()
    created_at: datetime = _time(index=True)
    experts: bytes = Field(sa_type=LargeBinary)


class MetricsRow(Table, table=True):
    """The metrics of one operation, or those that the client logged for one step (`seq_id` -1)."""

    __tablename__ = "metrics"
    __table_args__ = ({"sqlite_with_rowid": False},)

    model_id: str = Field(primary_key=True)
    step: int = Field(sa_column=Column(BigInteger, primary_key=True, autoincrement=False))
    seq_id: int = Field(sa_column=Column(BigInteger, primary_key=True, autoincrement=False))
    time: datetime = _time()
    numbers: bytes = Field(sa_type=LargeBinary)  # by name, in msgpack


class SecretRow(Table, table=True):
    __tablename__ = "secrets"

    name: str = Field(primary_key=True)
    value: bytes = Field(sa_type=LargeBinary)


class RetentionRow(Table, table=True):
    """A single row: operations that finished before `finished_before` have been removed."""

    __tablename__ = "retention"

    id: int = Field(default=1, sa_column=Column(Integer, primary_key=True, autoincrement=False))
    finished_before: datetime = _time()


class WriteCheckRow(Table, table=True):
    """A row is put in place of the last one to find out whether the database can be written again."""

    __tablename__ = "write_checks"

    id: int | None = Field(default=None, primary_key=True)
    content: bytes = Field(sa_type=LargeBinary)


def _table(row: Any) -> Table_:  # Any: a class, which mypy takes for its metaclass
    table: Table_ = row.metadata.tables[row.__tablename__]
    return table


# Nothing maps rows to objects: a mapped object costs several times as much as its statement.
OPERATIONS, PAYLOADS, RESULTS, FINISHED_SAMPLES, SAMPLE_COUNTS, PENDING_WORK = map(
    _table, (OperationRow, PayloadRow, ResultRow, FinishedSampleRow, SampleCountRow, PendingWorkRow)
)
SESSIONS, RUNS, SAMPLING_SESSIONS, CHECKPOINTS, RECOVERY_POINTS = map(
    _table, (SessionRow, RunRow, SamplingSessionRow, CheckpointRow, RecoveryPointRow)
)
ENGINES, LEASES, USAGE, ROUTED_EXPERTS, METRICS, SECRETS, RETENTION, WRITE_CHECKS = map(
    _table, (EngineRow, LeaseRow, UsageRow, RoutedExpertsRow, MetricsRow, SecretRow, RetentionRow, WriteCheckRow)
)


def columns_of(record: type, table: Table_) -> tuple[Column[Any], ...]:
    """Return the columns that a record has, in its order."""
    return tuple(table.c[field.name] for field in fields(record))


def to_record(row: object, record: type[R]) -> R:
    """Make a record from a row that has its fields."""
    return record(**{field.name: getattr(row, field.name) for field in fields(record)})  # type: ignore[arg-type]  # R is a dataclass


def to_values(record: object) -> dict[str, Any]:  # Any: values of the columns
    return {field.name: getattr(record, field.name) for field in fields(record)}  # type: ignore[arg-type]  # a dataclass


def put(connection: Connection, table: Table_, values: Mapping[str, Any]) -> None:  # Any: values of the columns
    """Insert a row, or replace what the one with its key has in these columns."""
    keys = [column == values[column.name] for column in table.primary_key]
    if connection.execute(table.update().where(*keys).values(**values)).rowcount == 0:
        connection.execute(table.insert(), values)
