"""The tables of the log, declared with SQLModel. `statements.py` reads and writes them: nothing maps rows to objects.

Payloads and results have tables of their own, so that changing an operation's state does not rewrite its tensors.
Columns are named as the fields of the records, and typed as they are stored: see `statements.py`.
"""

from typing import Any, Final

from sqlalchemy import Column, ForeignKey, Index, Integer, LargeBinary, text
from sqlmodel import Field, UniqueConstraint

from tinsmith.sql_store.columns import BigKey, TableBase, TableField, int64, json_value, key_part, named_metadata


class Table(TableBase):
    """Base of the tables."""

    metadata = named_metadata()


def _partial(name: str, *columns: str, where: str) -> Index:
    """The condition is a literal: SQLite uses a partial index only if the query contains the same condition as one."""
    return Index(name, *columns, sqlite_where=text(where), postgresql_where=text(where))


_LIVE: Final = "state IN ('creating', 'ready', 'parked')"


class Sessions(Table, table=True):
    __table_args__ = (
        UniqueConstraint("tenant", "idempotency_key"),
        _partial("ix_sessions_open", "tenant", where="ended IS NULL"),
        _partial("ix_sessions_described", "tenant", "described_bytes", where="described_bytes > 0"),
    )

    session_id: str = Field(primary_key=True)
    tenant: str = Field(index=True)
    idempotency_key: str | None
    created_at: int = int64(index=True)
    last_seen_at: int = int64(index=True)
    heard_since: int = int64()  # heartbeats have arrived all the time since then
    tags: Any = json_value()
    user_metadata: Any = json_value(nullable=True)
    sdk_version: str | None
    project_id: str | None
    display_name: str | None
    ended: str | None
    end_detail: str | None
    heard_by: str | None
    described_bytes: int = int64()  # of what the client says of it


class Runs(Table, table=True):
    __table_args__ = (
        _partial("ix_runs_live", "base_model", "created_at", where=_LIVE),
        _partial("ix_runs_live_of_tenant", "tenant", where=_LIVE),
        _partial("ix_runs_described", "tenant", "described_bytes", where="described_bytes > 0"),
    )

    model_id: str = Field(primary_key=True)
    session_id: str = Field(index=True)
    tenant: str = Field(index=True)
    base_model: str = Field(index=True)
    lora: Any = json_value()
    created_at: int = int64(index=True)
    last_request_at: int = int64()
    user_metadata: Any = json_value(nullable=True)
    state: str
    state_reason: str | None
    next_seq_id: int = int64()
    applied_seq_id: int = int64()
    arrived_seq_id: int = int64()  # up to here none is missing; see `subjects/submitting.py`
    pruned_seq_id: int = int64()  # the highest one that retention has removed
    unload_seq_id: int | None = int64(nullable=True)  # once the session has ended
    rebuilds: int  # rebuilds begun and not finished: how often an engine died in one
    steps: int = int64()
    metric_bytes: int = int64()
    rollout_bytes: int = int64()
    described_bytes: int = int64()  # as of a session


class SamplingSessions(Table, table=True):
    __table_args__ = (
        _partial("ix_sampling_sessions_sized", "session_id", "num_bytes", where="num_bytes > 0"),
        Index("ix_sampling_sessions_newest", "model_id", "created_at"),
    )

    sampling_session_id: str = Field(primary_key=True)
    session_id: str = Field(index=True)
    tenant: str
    base_model: str
    created_at: int = int64()
    snapshot_id: str | None
    model_path: str | None
    model_id: str | None
    checkpoint_created_at: int | None = int64(nullable=True)
    only_while_public: bool
    num_bytes: int = int64()  # of a snapshot of its own


class Checkpoints(Table, table=True):
    __table_args__ = (
        _partial("ix_checkpoints_kept", "tenant", "size_bytes", where="deleted_at IS NULL"),
        Index("ix_checkpoints_newest", "model_id", "kind", "created_at", "path"),
    )

    path: str = Field(primary_key=True)
    model_id: str
    tenant: str = Field(index=True)
    kind: str
    base_model: str
    lora: Any = json_value()
    created_at: int = int64(index=True)
    size_bytes: int = int64()
    directory: str
    step: int = int64()
    public: bool
    expires_at: int | None = int64(index=True, nullable=True)
    user_metadata: Any = json_value()
    deleted_at: int | None = int64(nullable=True)  # kept for repeated requests


class Operations(Table, table=True):
    __table_args__ = (
        UniqueConstraint("subject_id", "seq_id"),
        _partial(
            "ix_operations_queued",
            "base_model",
            "early",
            "ordered",
            "tenant",
            "arrival",
            "seq_id",
            where="state = 'queued'",
        ),
        _partial("ix_operations_early", "base_model", "subject_id", "created_at", where="state = 'queued' AND early"),
        _partial("ix_operations_alone", "base_model", "id", where="state = 'queued' AND alone"),
        _partial("ix_operations_running", "base_model", "id", where="state = 'running'"),
        _partial("ix_operations_untold", "base_model", where="NOT cancel_told"),
        {"sqlite_autoincrement": True},
    )

    id: int | None = Field(default=None, sa_column=Column(BigKey, primary_key=True))  # the order of arrival
    request_id: str = Field(unique=True)
    base_model: str
    kind: str
    tenant: str
    session_id: str
    subject_id: str
    seq_id: int = int64()
    ordered: bool
    early: bool  # a lower seq_id of its model is missing
    arrival: int = int64()  # orders what a tenant has waiting, as it arrived, but never against the order of a model
    num_tokens: int = int64()
    num_bytes: int = int64()  # once decoded
    payload_bytes: int = int64()  # as stored
    digest: bytes = Field(sa_type=LargeBinary)
    state: str
    created_at: int = int64()
    started_at: int | None = int64(nullable=True)
    finished_at: int | None = int64(index=True, nullable=True)
    engine_id: str | None  # the engine that claimed it
    attempts: int  # how often it was claimed, without orderly stops and interruptions
    interruptions: int  # how often its engine was killed from outside
    alone: bool  # an engine died while it ran, so the next attempt runs by itself
    cancel_told: bool  # False: its engine does not know yet that it was cancelled
    traceparent: str | None


def _operation_key() -> TableField:
    key = Column(BigKey, ForeignKey("operations.id", ondelete="CASCADE"), primary_key=True, autoincrement=False)
    return Field(sa_column=key)


class Payloads(Table, table=True):
    operation_id: int = _operation_key()
    payload: bytes = Field(sa_type=LargeBinary)


class Results(Table, table=True):
    operation_id: int = _operation_key()
    result_kind: str
    result: bytes = Field(sa_type=LargeBinary)
    ran_at: int | None = int64(nullable=True)  # None: it did not run
    run_s: float | None
    first_token_s: float | None


class FinishedSamples(Table, table=True):
    """The number of a finished sample among the samples of its client."""

    subject_id: str = Field(primary_key=True)
    clone: int = key_part()
    number: int = key_part()  # from 1
    request_id: str
    succeeded: bool
    size_bytes: int = int64()
    finished_at: int = int64(index=True)


class SampleCounts(Table, table=True):
    """The last number used in `finished_samples`, for each client."""

    subject_id: str = Field(primary_key=True)
    clone: int = key_part()
    last: int = int64()


class PendingWork(Table, table=True):
    """The operations that have ever arrived, or finished; and the size of their payloads.

    `stored_bytes` summed over a tenant's rows is the size of the payloads and results that it has in the log.
    """

    tenant: str = Field(primary_key=True)
    kind: str = Field(primary_key=True)
    finished: bool = Field(primary_key=True)
    number: int = int64()
    num_bytes: int = int64()
    stored_bytes: int = int64()


class Engines(Table, table=True):
    base_model: str = Field(primary_key=True)
    state: str
    updated_at: int = int64()
    detail: str
    progress: float | None
    engine_id: str | None
    pid: int | None
    restarts: int
    capabilities: Any = json_value(nullable=True)
    consistency: Any = json_value(nullable=True)
    turn: Any = json_value(nullable=True)
    sampler_trouble: str | None
    failure: Any = json_value(nullable=True)


class EngineFigures(Table, table=True):
    """Apart from `engines`, which is read much more often than this is."""

    base_model: str = Field(primary_key=True)
    reported_at: int = int64()
    report: bytes = Field(sa_type=LargeBinary)


class Leases(Table, table=True):
    """Never deleted, because the epoch must never start again."""

    base_model: str = Field(primary_key=True)
    epoch: int = int64()
    engine_id: str | None  # None: released
    expires_at: int = int64()


class RecoveryPoints(Table, table=True):
    model_id: str = Field(primary_key=True)
    seq_id: int = key_part()
    directory: str
    size_bytes: int = int64()
    created_at: int = int64()


class RoutedExperts(Table, table=True):
    """The experts of a sequence that a tenant sampled from a model, by the digest of its tokens, in order of age."""

    __table_args__ = (
        UniqueConstraint("tenant", "model_id", "digest"),
        Index("ix_routed_experts_tenant_id_num_bytes", "tenant", "id", "num_bytes"),
    )

    id: int | None = Field(default=None, sa_column=Column(BigKey, primary_key=True))
    tenant: str
    model_id: str
    digest: bytes = Field(sa_type=LargeBinary)
    num_bytes: int = int64()
    created_at: int = int64(index=True)
    experts: bytes = Field(sa_type=LargeBinary)


class Metrics(Table, table=True):
    """The metrics of one operation, or those that the client logged for one step (`seq_id` -1)."""

    __table_args__ = ({"sqlite_with_rowid": False},)

    model_id: str = Field(primary_key=True)
    step: int = key_part()
    seq_id: int = key_part()
    time: int = int64()
    numbers: bytes = Field(sa_type=LargeBinary)  # by name, in msgpack


class Origins(Table, table=True):
    """Which checkpoint a run took its weights from."""

    model_id: str = Field(primary_key=True)
    seq_id: int = key_part()
    path: str
    source_id: str = Field(index=True)
    step: int = int64()
    created_at: int = int64()


class ApiKeys(Table, table=True):
    """Keys made over HTTP. The id is a keyed hash of the key, which is kept nowhere."""

    key_id: str = Field(primary_key=True)
    tenant: str = Field(index=True)
    name: str
    note: str
    made_with: str
    created_at: int = int64()
    expires_at: int | None = int64(nullable=True)


class EndedLogins(Table, table=True):
    """Sessions of browsers that have ended before their time."""

    login_id: str = Field(primary_key=True)
    until: int = int64()  # when it would have ended by itself


class Audit(Table, table=True):
    """Who made, changed or deleted what, and when."""

    __table_args__ = (Index("ix_audit_tenant_at", "tenant", "at"),)

    id: int | None = Field(default=None, sa_column=Column(BigKey, primary_key=True))
    at: int = int64(index=True)
    tenant: str
    event: str
    details: Any = json_value()


class Rollouts(Table, table=True):
    """The rollouts of one pass, or the rewards that the client logged for one step (`seq_id` -1)."""

    model_id: str = Field(primary_key=True)
    step: int = key_part()
    seq_id: int = key_part()
    number: int
    num_bytes: int = int64()
    content: bytes = Field(sa_type=LargeBinary)


class Secrets(Table, table=True):
    name: str = Field(primary_key=True)
    value: bytes = Field(sa_type=LargeBinary)


class Retention(Table, table=True):
    """A single row: operations that finished before `finished_before` have been removed."""

    id: int = Field(default=1, sa_column=Column(Integer, primary_key=True, autoincrement=False))
    finished_before: int = int64()


class WriteChecks(Table, table=True):
    """A row is put in place of the last one to find out whether the database can be written again."""

    id: int | None = Field(default=None, primary_key=True)
    content: bytes = Field(sa_type=LargeBinary)
