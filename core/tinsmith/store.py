"""The request store's seam: the durable log of operations, and the few tables around it.

Server and engine share nothing else. A store is asynchronous, its waits are event-driven, and what it acknowledges is
durable. One `RequestStore` object belongs to one process; several processes open the same database.

Life of an operation: `submit` (queued) -> `claim` (running) -> `complete` (succeeded | failed). Operations of a
*stream* that are `ordered` (all of one model) are claimed in seq_id order without gaps; those of a sampling session
are not ordered, only unique by (stream, seq_id).
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum
from pathlib import Path
from typing import Any, Generic, Literal, TypeVar

from tinsmith.backend import BackendConfig, Capabilities
from tinsmith.operations import Failed, LoraConfig, Result

Metadata = dict[str, Any]  # Any: JSON values the client chose


class OperationState(StrEnum):
    QUEUED = "queued"
    RUNNING = "running"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"


class RunState(StrEnum):
    CREATING = "creating"
    READY = "ready"
    LOST = "lost"  # its state could not be made or rebuilt; the reason is in `state_reason`
    UNLOADED = "unloaded"  # the session ended


class EngineState(StrEnum):
    STARTING = "starting"
    LOADING = "loading"
    RECOVERING = "recovering"  # rebuilding the models that the engine before it held
    READY = "ready"
    RESTARTING = "restarting"
    FAILED = "failed"  # given up; `detail` says why
    STOPPED = "stopped"


SessionEnd = Literal["success", "errored", "interrupted", "expired"]
CheckpointKind = Literal["training", "sampler", "external"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionRecord:
    session_id: str
    tenant: str
    created_at: datetime
    last_seen_at: datetime
    tags: tuple[str, ...] = ()
    user_metadata: Metadata | None = None
    sdk_version: str | None = None
    project_id: str | None = None
    display_name: str | None = None
    ended: SessionEnd | None = None
    end_detail: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRecord:
    """A model, which the REST API calls a training run."""

    model_id: str  # {session_id}:train:{model_seq_id}
    session_id: str
    tenant: str
    base_model: str
    lora: LoraConfig
    created_at: datetime
    last_request_at: datetime
    user_metadata: Metadata | None = None
    state: RunState = RunState.CREATING
    state_reason: str | None = None
    next_seq_id: int = 0  # the lowest one not yet claimed
    applied_seq_id: int = -1  # the highest one whose result is recorded


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplerRecord:
    """A sampling session. `snapshot_id` None is the base model; a tinker:// path is a persisted snapshot."""

    sampling_session_id: str
    session_id: str
    tenant: str
    base_model: str
    created_at: datetime
    snapshot_id: str | None = None
    model_path: str | None = None
    model_id: str | None = None  # the model it was taken from, where known


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointRecord:
    path: str  # tinker://<model_id>/<weights|sampler_weights|external_weights>/<name>
    model_id: str
    tenant: str
    kind: CheckpointKind
    base_model: str
    lora: LoraConfig
    created_at: datetime
    size_bytes: int
    directory: str  # relative to the checkpoint root
    step: int = 0
    public: bool = False
    expires_at: datetime | None = None
    user_metadata: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotRecord:
    """A model's whole training state on disk, as of the operation `seq_id`: where a recovery starts."""

    model_id: str
    seq_id: int
    directory: str  # relative to the engine's recovery root
    size_bytes: int
    created_at: datetime


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveModel:
    """What an engine that starts has to rebuild."""

    run: RunRecord
    pruned_seq_id: int  # operations up to here may be gone from the log
    snapshots: tuple[SnapshotRecord, ...]  # newest first
    ephemeral: tuple[str, ...]  # ids of the sampling snapshots that live as long as the model


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineRecord:
    """What the engine of one base model last said of itself."""

    base_model: str
    state: EngineState
    updated_at: datetime
    detail: str = ""  # "loading weights", "compiling 3 of 22", the reason of a failure
    progress: float | None = None  # 0 to 1
    engine_id: str | None = None
    pid: int | None = None
    restarts: int = 0
    capabilities: Capabilities | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class NewOperation:
    """What `submit` records. `digest` is of the content that a repeat must match."""

    base_model: str  # the queue: one engine serves each
    kind: str
    tenant: str
    session_id: str
    stream: str  # model_id or sampling_session_id
    seq_id: int
    ordered: bool
    payload: bytes
    digest: bytes
    num_tokens: int = 0
    refused: Failed | None = None  # recorded as failed at once; consumes its seq_id all the same


@dataclass(frozen=True, slots=True, kw_only=True)
class OperationRecord:
    request_id: str
    base_model: str
    kind: str
    tenant: str
    session_id: str
    stream: str
    seq_id: int
    ordered: bool
    num_tokens: int
    state: OperationState
    created_at: datetime
    started_at: datetime | None = None
    finished_at: datetime | None = None
    payload: bytes | None = None  # only in what `claim` and `replayable` return
    result_kind: str | None = None
    result: bytes | None = None  # only in what `wait_for`, `get_operation` and `replayable` return


# What a completed operation changes besides its own row; written in the same transaction -----------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class RunStateChanged:
    model_id: str
    state: RunState
    reason: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraResolved:
    """A model made from a checkpoint: its LoRA config is known only now."""

    model_id: str
    lora: LoraConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointWritten:
    record: CheckpointRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplerCreated:
    record: SamplerRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotTaken:
    """The state right after this very operation; the newest `keep` stay registered."""

    record: SnapshotRecord
    keep: int


Effect = RunStateChanged | LoraResolved | CheckpointWritten | SamplerCreated | SnapshotTaken


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    request_id: str
    result: Result
    effects: tuple[Effect, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Waiting:
    """Why an operation is still pending."""

    missing_seq_id: int | None = None  # a lower one that has not arrived
    num_ahead: int = 0  # operations of the same base model queued or running before it
    engine: EngineRecord | None = None


class RequestStore(ABC):
    """Every method may be called concurrently from the process's event loop.

    Methods raise NotFoundError for an id that does not exist, and ServerError when the database cannot be reached.
    """

    @abstractmethod
    async def open(self) -> None:
        """Connect, migrate to the newest schema, listen for wake-ups."""

    @abstractmethod
    async def close(self) -> None: ...

    # sessions

    @abstractmethod
    async def create_session(self, session: SessionRecord, *, idempotency_key: str | None) -> SessionRecord:
        """Insert; a second call with the same key (and tenant) returns the first session."""

    @abstractmethod
    async def get_session(self, session_id: str) -> SessionRecord: ...

    @abstractmethod
    async def list_sessions(self, tenant: str | None, *, limit: int, offset: int) -> list[SessionRecord]:
        """Newest first. `tenant` None lists everybody's."""

    @abstractmethod
    async def touch_session(self, session_id: str, at: datetime) -> SessionRecord: ...

    @abstractmethod
    async def update_session(self, session_id: str, *, project_id: str | None) -> SessionRecord: ...

    @abstractmethod
    async def end_session(self, session_id: str, reason: SessionEnd, detail: str | None) -> SessionRecord:
        """Record the end (the first reason wins) and queue an UnloadModel behind each live model's last operation."""

    @abstractmethod
    async def expire_sessions(self, last_seen_before: datetime) -> list[str]:
        """End those not seen since, with reason "expired"; return their ids."""

    # models, samplers, checkpoints

    @abstractmethod
    async def create_run(self, run: RunRecord, operation: NewOperation) -> str:
        """Insert the run and submit its creation (seq_id 0) in one transaction; a repeat returns the first id."""

    @abstractmethod
    async def get_run(self, model_id: str) -> RunRecord: ...

    @abstractmethod
    async def list_runs(
        self, tenant: str | None, *, session_id: str | None = None, limit: int, offset: int
    ) -> tuple[list[RunRecord], int]:
        """Return newest first, and the total number."""

    @abstractmethod
    async def create_sampler(self, sampler: SamplerRecord) -> SamplerRecord:
        """Insert; a repeat by sampling_session_id returns the first."""

    @abstractmethod
    async def get_sampler(self, sampling_session_id: str) -> SamplerRecord: ...

    @abstractmethod
    async def list_samplers(self, session_id: str) -> list[SamplerRecord]: ...

    @abstractmethod
    async def get_checkpoint(self, path: str) -> CheckpointRecord: ...

    @abstractmethod
    async def list_checkpoints(
        self, tenant: str | None, *, model_id: str | None = None, limit: int | None = None, offset: int = 0
    ) -> tuple[list[CheckpointRecord], int]:
        """Return newest first, and the total number."""

    @abstractmethod
    async def update_checkpoint(
        self, path: str, change: Callable[[CheckpointRecord], CheckpointRecord]
    ) -> CheckpointRecord:
        """Replace `public` or `expires_at` atomically; `change` may raise to refuse."""

    @abstractmethod
    async def delete_checkpoint(self, path: str) -> CheckpointRecord: ...

    @abstractmethod
    async def expired_checkpoints(self, now: datetime) -> list[CheckpointRecord]: ...

    # the log, server side

    @abstractmethod
    async def submit(self, operation: NewOperation) -> str:
        """Record durably and return the request_id.

        The same (stream, seq_id) and digest returns the first request_id; another digest raises ConflictError. What
        can never run is recorded as failed at once: of a lost model, or for an engine that has been given up. Raise
        NotFoundError for a model that does not exist, UserError where its session has ended.
        """

    @abstractmethod
    async def get_operation(self, request_id: str) -> OperationRecord:
        """Raise ResultExpiredError where the id is of an operation that retention has removed."""

    @abstractmethod
    async def wait_for(self, request_id: str, timeout_s: float) -> OperationRecord:
        """Return as soon as it is finished, or its record as it stands after `timeout_s`."""

    @abstractmethod
    async def waiting(self, request_id: str) -> Waiting: ...

    @abstractmethod
    async def count_samples(self, tenant: str) -> int:
        """Return how many of a tenant's unordered operations are queued or running."""

    @abstractmethod
    async def cancel(self, request_id: str) -> OperationRecord:
        """Cancel an unordered operation that is queued or running; anything else is left as it is."""

    # the log, engine side

    @abstractmethod
    async def claim(
        self,
        base_model: str,
        *,
        engine_id: str,
        max_operations: int,
        ordered: bool | None = None,
        alone: bool = False,
    ) -> list[OperationRecord]:
        """Take what is runnable: of each model what is queued from `next_seq_id` on without a gap, and any sample.

        With `ordered` only operations of models (True) or only samples (False); with `alone` only what `requeue` has
        marked to run by itself. Tenants take turns, each with its oldest first. Returns at once, maybe empty. Raise
        ServerError where a later engine has reported itself.
        """

    @abstractmethod
    async def complete(self, completions: Sequence[Completion]) -> None:
        """Record results, effects and the models' applied positions in one transaction; wake who waits.

        Operations that were cancelled meanwhile are skipped.
        """

    @abstractmethod
    async def cancelled(self, base_model: str) -> list[str]:
        """Return the request_ids of claimed operations cancelled since the last call."""

    @abstractmethod
    async def fail_gaps(self, base_model: str, *, older_than: datetime) -> int:
        """Fail what has waited since before `older_than` behind a missing seq_id, naming it; move the model past."""

    @abstractmethod
    async def wait_for_work(self, base_model: str, timeout_s: float) -> None:
        """Return when something of this queue may have become claimable or cancelled, or after `timeout_s`."""

    # recovery, engine side

    @abstractmethod
    async def requeue(self, base_model: str, *, max_attempts: int, reason: str | None) -> list[str]:
        """Put what was running back into the queue; return the request_ids that failed instead.

        Where an engine died (`reason` says how) any of them may be what killed it: those of models, and a sample that
        has one attempt left, are marked to run alone; what has had `max_attempts` fails, and its model goes on from
        the state before it. `reason` None is an orderly stop, which does not count as an attempt.
        """

    @abstractmethod
    async def live_models(self, base_model: str) -> list[LiveModel]:
        """Return the models that have been created and neither lost nor unloaded, oldest first."""

    @abstractmethod
    async def replayable(self, model_id: str, *, after_seq_id: int, limit: int) -> list[OperationRecord]:
        """Return the succeeded operations after `after_seq_id` in order, with payloads and results."""

    @abstractmethod
    async def add_snapshot(self, record: SnapshotRecord, *, keep: int) -> None:
        """Register a snapshot, and forget all but the newest `keep` of its model.

        Raise ServerError where the results up to its seq_id are not recorded yet, or its model is not live any more.
        """

    @abstractmethod
    async def list_snapshots(self, model_id: str) -> list[SnapshotRecord]:
        """Newest first. A model that is lost or unloaded has none."""

    @abstractmethod
    async def drop_snapshot(self, model_id: str, seq_id: int) -> None:
        """Forget one that turned out to be damaged."""

    @abstractmethod
    async def lose_run(self, model_id: str, reason: str) -> None:
        """Mark a model lost, and fail what waits for it."""

    @abstractmethod
    async def note_run(self, model_id: str, note: str) -> None:
        """Show `note` as the `state_reason` of a model that lives on."""

    # engines

    @abstractmethod
    async def report_engine(self, record: EngineRecord) -> None:
        """Upsert by base_model. With state FAILED everything pending of the base model fails, with `detail`."""

    @abstractmethod
    async def list_engines(self) -> list[EngineRecord]: ...

    # housekeeping

    @abstractmethod
    async def prune(self, finished_before: datetime) -> int:
        """Delete operations finished before then (payload and result); return how many.

        What the recovery of a live model could need stays: the operations after its oldest snapshot, or all of them.
        """


C = TypeVar("C", bound=BackendConfig)


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreContext:
    data_dir: Path


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreSpec(Generic[C]):
    """An offer of a store. `create` does no I/O; `open` does."""

    name: str
    config: type[C]
    create: Callable[[C, StoreContext], RequestStore]
    description: str = ""
