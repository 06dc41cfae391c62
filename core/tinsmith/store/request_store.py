"""The request store's seam: the durable log of operations, and the few tables around it.

Server and engine share nothing else. A store is asynchronous, its waits are event-driven, and what it acknowledges is
durable. One `RequestStore` object belongs to one process; several processes open the same database.

Life of an operation: `submit` (queued) -> `claim` (running) -> `complete` (succeeded | failed). Operations of a
*subject_id* that are `ordered` (all of one model) are claimed in seq_id order without gaps; those of a sampling session
are not ordered, only unique by (subject_id, seq_id).
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Generic, TypeVar

from tinsmith.backend import BackendConfig
from tinsmith.store.records import (
    CheckpointRecord,
    Completion,
    EngineRecord,
    FinishedSamples,
    Lease,
    LeaseHeld,
    LiveModel,
    LoggedOperation,
    LogTotals,
    NewOperation,
    OperationRecord,
    RecoveryPointRecord,
    RunLog,
    RunRecord,
    SamplingSessionRecord,
    SessionEnd,
    SessionRecord,
    Waiting,
)


class RequestStore(ABC):
    """Every method may be called concurrently from the process's event loop.

    Methods raise NotFoundError for an id that does not exist, and StoreError when the database cannot be reached.
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
    async def create_sampling_session(self, sampler: SamplingSessionRecord) -> SamplingSessionRecord:
        """Insert; a repeat by sampling_session_id returns the first."""

    @abstractmethod
    async def get_sampling_session(self, sampling_session_id: str) -> SamplingSessionRecord: ...

    @abstractmethod
    async def list_sampling_sessions(self, session_id: str) -> list[SamplingSessionRecord]: ...

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
    async def deleted_checkpoint(self, path: str) -> CheckpointRecord:
        """Return what `delete_checkpoint` has deleted, until `prune` removes the last trace of it."""

    @abstractmethod
    async def expired_checkpoints(self, now: datetime) -> list[CheckpointRecord]: ...

    @abstractmethod
    async def add_checkpoint(self, record: CheckpointRecord) -> None:
        """Record one that no operation has written. Raise UserError where its path is taken."""

    # a model's log, for people

    @abstractmethod
    async def run_log(self, model_id: str) -> RunLog: ...

    @abstractmethod
    async def list_log(self, model_id: str, *, from_seq_id: int | None, limit: int) -> list[LoggedOperation]:
        """Return operations in order, from `from_seq_id` on; None returns the last ones."""

    @abstractmethod
    async def log_totals(self, model_id: str) -> list[LogTotals]:
        """Return one per kind and state that there is, by kind."""

    # the log, server side

    @abstractmethod
    async def submit(self, operation: NewOperation) -> str:
        """Record durably and return the request_id.

        The same (subject_id, seq_id) and digest returns the first request_id; another digest raises ConflictError. What
        cannot run is recorded as failed at once: of a lost model; for an engine that has been given up, unless it is
        of a model that has been created, which waits for the next one. Raise
        NotFoundError for a model that does not exist, UserError where its session has ended.
        """

    @abstractmethod
    async def get_operation(self, request_id: str) -> OperationRecord:
        """Raise ResultExpiredError where the id is of an operation that retention has removed."""

    @abstractmethod
    async def wait_for(self, request_id: str, timeout_s: float) -> OperationRecord:
        """Return as soon as it is finished, or its record as it stands after `timeout_s`."""

    @abstractmethod
    async def finished_samples(
        self, sampling_session_id: str, clone: int, *, after: int, limit: int, timeout_s: float
    ) -> FinishedSamples:
        """Return at most `limit` of what finished after the cursor `after` (0 is the start), in order.

        Where there is nothing yet, wait for it up to `timeout_s`. Succeeded, failed and cancelled ones get their place
        in the transaction that finishes them (in order of arrival where it finishes several) and become visible in this
        order, whoever finishes them: nothing ever appears behind a cursor. An entry outlives its operation by hours, so
        that a client that was away learns that a result is gone instead of waiting for it. Raise UserError for a cursor
        that is ahead of all that is recorded.
        """

    @abstractmethod
    async def waiting(self, request_id: str) -> Waiting: ...

    @abstractmethod
    async def count_samples(self, tenant: str) -> int:
        """Return how many of a tenant's unordered operations are queued or running."""

    @abstractmethod
    async def cancel(self, request_id: str) -> OperationRecord:
        """Cancel an unordered operation that is queued or running; anything else is left as it is."""

    # leases: at most one engine of a base model records anything

    @abstractmethod
    async def acquire_lease(
        self, base_model: str, *, engine_id: str, duration_s: float, dead: str | None = None
    ) -> Lease | LeaseHeld:
        """Take the lease where it is free, was released, or has run out; durable, with an epoch that only grows.

        `dead` names an engine that is known to have ended: its lease counts as released. An engine that holds the
        lease already renews it.
        """

    @abstractmethod
    async def renew_lease(self, lease: Lease) -> None:
        """Have it last for `duration_s` from now, also where it had run out and nobody has taken it since.

        Raise LeaseLostError where another engine has, or it was released.
        """

    @abstractmethod
    async def release_lease(self, base_model: str, engine_id: str) -> None:
        """Free the lease where this engine holds it, and wake who waits for it."""

    @abstractmethod
    async def wait_for_lease(self, base_model: str, timeout_s: float) -> None:
        """Return when the lease may have been released, or after `timeout_s`."""

    # the log, engine side. With a lease, everything raises LeaseLostError, and changes nothing, once another engine has
    # taken it over. A lease that has merely run out is renewed in the same transaction.

    @abstractmethod
    async def claim(
        self,
        lease: Lease,
        *,
        max_operations: int,
        ordered: bool | None = None,
        alone: bool = False,
    ) -> list[OperationRecord]:
        """Take what is runnable: of each model what is queued from `next_seq_id` on without a gap, and any sample.

        With `ordered` only operations of models (True) or only samples (False); with `alone` only what `requeue` has
        marked to run by itself. Tenants take turns, each with its oldest first. Returns at once, maybe empty.
        """

    @abstractmethod
    async def complete(self, lease: Lease, completions: Sequence[Completion]) -> None:
        """Record results, effects and the models' applied positions in one transaction; wake who waits.

        Operations that were cancelled meanwhile are skipped, and those that another engine has claimed.
        """

    @abstractmethod
    async def cancelled(self, lease: Lease) -> list[str]:
        """Return the request_ids of claimed operations cancelled since the last call."""

    @abstractmethod
    async def fail_gaps(self, base_model: str, *, older_than: datetime) -> int:
        """Fail what has waited since before `older_than` behind a missing seq_id, naming it; move the model past.

        It asks for no lease: the log alone decides, and nothing of a model changes while an operation of it runs.
        """

    @abstractmethod
    async def wait_for_work(self, base_model: str, timeout_s: float) -> None:
        """Return when something of this queue may have become claimable or cancelled, or after `timeout_s`."""

    # recovery, engine side

    @abstractmethod
    async def requeue(
        self,
        lease: Lease,
        *,
        max_attempts: int,
        reason: str | None,
        max_interruptions: int | None = None,
        held: Collection[str] = (),
    ) -> list[str]:
        """Put what was running back into the queue; return the request_ids that failed instead.

        Where an engine died (`reason` says how) any of them may be what killed it: those of models, and a sample that
        has one attempt left, are marked to run alone; what has had `max_attempts` fails, and its model goes on from
        the state before it. With `max_interruptions` the engine was killed from outside: that counts as an
        interruption, not as an attempt. `reason` None is an orderly stop, which counts as neither. What is `held`, by
        request_id, stays as it is: an engine that did not hear what it had claimed puts the rest back.
        """

    @abstractmethod
    async def live_models(self, base_model: str) -> list[LiveModel]:
        """Return the models that have been created and neither lost nor unloaded, oldest first."""

    @abstractmethod
    async def begin_rebuild(self, lease: Lease, model_id: str, *, interrupted: bool) -> int:
        """Count one more rebuild of the model, and return how many were begun since the last one that was finished.

        With `interrupted` the engine before was killed from outside, so that what it had begun does not count.
        """

    @abstractmethod
    async def end_rebuild(self, lease: Lease, model_id: str) -> None:
        """The model is there: forget the count."""

    @abstractmethod
    async def replayable(self, model_id: str, *, after_seq_id: int, limit: int) -> list[OperationRecord]:
        """Return the succeeded operations after `after_seq_id` in order, with payloads and results."""

    @abstractmethod
    async def add_recovery_point(self, lease: Lease, record: RecoveryPointRecord, *, keep: int) -> None:
        """Register a snapshot, and forget all but the newest `keep` of its model.

        Raise ServerError where the results up to its seq_id are not recorded yet, or its model is not live any more.
        """

    @abstractmethod
    async def list_recovery_points(self, model_id: str) -> list[RecoveryPointRecord]:
        """Newest first. A model that is lost or unloaded has none."""

    @abstractmethod
    async def drop_recovery_point(self, lease: Lease, model_id: str, seq_id: int) -> None:
        """Forget one that turned out to be damaged."""

    @abstractmethod
    async def lose_run(self, lease: Lease, model_id: str, reason: str) -> None:
        """Mark a model lost, and fail what waits for it."""

    @abstractmethod
    async def note_run(self, lease: Lease, model_id: str, note: str) -> None:
        """Show `note` as the `state_reason` of a model that lives on."""

    # engines

    @abstractmethod
    async def report_engine(self, record: EngineRecord, *, lease: Lease | None = None) -> None:
        """Upsert by base_model.

        Without a lease (a supervisor's report) it is ignored while an engine holds one.

        With state FAILED everything pending of the base model fails, with `detail`, except the operations of models
        that have been created: these are kept, and go on when an engine starts again.
        """

    @abstractmethod
    async def list_engines(self) -> list[EngineRecord]: ...

    # secrets

    @abstractmethod
    async def secret(self, name: str) -> bytes:
        """Return the 32 random bytes of that name: made once, the same for every process on this database."""

    # housekeeping

    @abstractmethod
    async def prune(self, finished_before: datetime, *, idle_since: datetime | None = None) -> int:
        """Delete operations finished before then (payload and result); return how many.

        What the recovery of a live model could need stays: the operations after its oldest snapshot, or all of them.
        With `idle_since` the whole log of a model stays, too, to which a request came after then. What is deleted
        must be gone from the disk when this returns, as far as the database can do that: unreadable in its files.
        """


C = TypeVar("C", bound=BackendConfig)


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreContext:
    data_dir: Path
    shared: bool = False  # other servers use the directory, and this store, at the same time


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreSpec(Generic[C]):
    """An offer of a store. `create` does no I/O; `open` does."""

    name: str
    config: type[C]
    create: Callable[[C, StoreContext], RequestStore]
    description: str = ""
