"""The request store's interface: the durable log of operations, and the few tables around it.

Server and engine share nothing else. A store is asynchronous: its waits are driven by events, and what it acknowledges
is durable. One `RequestStore` object belongs to one process; several processes open the same database.

An operation is submitted (queued), claimed (running) and completed (succeeded or failed). Operations that are `ordered`
address a model and are claimed in seq_id order without gaps. Operations of a sampling session have no order; their
seq_ids only have to be unique within it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Concatenate, Generic, ParamSpec, TypeVar

from tinsmith.backend import BackendConfig
from tinsmith.figures import Figures
from tinsmith.store.records.access import AuditEntry, IssuedKey
from tinsmith.store.records.checkpoints import CheckpointRecord, KeptCheckpoints
from tinsmith.store.records.completions import Completion
from tinsmith.store.records.curves import Measured, MetricsRow, RolloutsRow
from tinsmith.store.records.engines import EngineRecord, Lease, LeaseHeld, ReportedFigures
from tinsmith.store.records.operations import (
    Claim,
    FailedPass,
    LoggedOperation,
    LogTotals,
    NewOperation,
    OperationRecord,
    PendingCounts,
    PendingWork,
    TimedOperation,
    Waiting,
)
from tinsmith.store.records.places import PlaceCounts, PlaceLimits, PlaceMoves
from tinsmith.store.records.runs import LiveModel, Origin, RecoveryPointRecord, RunLog, RunRecord
from tinsmith.store.records.sampling import DrawnTokens, FinishedSamples, SamplingSessionRecord
from tinsmith.store.records.sessions import SessionEnd, SessionRecord
from tinsmith.store.records.usage import KeptBytes
from tinsmith.store.shares import ClaimRoom
from tinsmith.store.tables import Tables

if TYPE_CHECKING:
    from sqlalchemy import Connection

_Config = TypeVar("_Config", bound=BackendConfig)
P = ParamSpec("P")
T = TypeVar("T")


class RequestStore(ABC):
    """Every method may be called concurrently from the process's event loop.

    Methods raise NotFoundError for an id that does not exist, and StoreError if the database cannot be reached. Those
    that take a lease raise LeaseLostError, and change nothing, once another engine has taken the lease over. A lease
    that has expired but was not taken over is renewed in the same transaction.
    """

    @property
    @abstractmethod
    def max_value_bytes(self) -> int:
        """The largest payload or result that the store can hold, as `codec` encodes it.

        Servers refuse an operation whose payload is larger, or whose result could be. Engines record a failure in
        place of a result that is larger. So `submit` and `complete` are never asked to store more.
        """

    @abstractmethod
    async def open(self) -> None:
        """Connect, migrate to the newest schema, and listen for wake-ups."""

    @abstractmethod
    async def close(self) -> None: ...

    @abstractmethod
    async def secret(self, name: str) -> bytes:
        """Return the 32 random bytes of that name, which are the same for every process on this database."""

    @abstractmethod
    async def expect_writes(self) -> None:
        """Raise StoreError if the last write failed, and a small one fails now."""

    @abstractmethod
    async def prune(self, finished_before: datetime, *, idle_since: datetime | None = None) -> int:
        """Delete operations that finished before then, with payloads and results. Return how many.

        Whatever the recovery of a live model could need is kept: the operations after its oldest recovery point, or
        all of them if it has none. With `idle_since`, the whole log of a model is kept if a request for it has arrived
        since then. On SQLite, deleted content is unreadable in the files when this returns.
        """

    # what packages keep in tables of their own (`tinsmith.tables`)

    @abstractmethod
    async def read(self, function: Callable[Concatenate[Connection, P], T], *args: P.args, **options: P.kwargs) -> T:
        """Run a synchronous function in a transaction that only reads. It sees everything that was committed before."""

    @abstractmethod
    async def write(self, function: Callable[Concatenate[Any, P], T], *args: P.args, **options: P.kwargs) -> T:
        """Run a synchronous function in a durable transaction, shared with other writes. It may run twice.

        Its first argument is a `tinsmith.tables.Transaction`. `tinsmith.tables.locks` names the runs to lock first.

        What it raises undoes its own changes alone. Cancelling the caller undoes nothing.
        """

    # sessions

    @abstractmethod
    async def create_session(
        self, session: SessionRecord, *, idempotency_key: str | None, by: Mapping[str, str] | None = None
    ) -> SessionRecord:
        """Insert the session. A second call with the same tenant and key returns the first session."""

    @abstractmethod
    async def get_session(self, session_id: str) -> SessionRecord: ...

    @abstractmethod
    async def find_sessions(self, session_ids: Collection[str]) -> dict[str, SessionRecord]:
        """Return the existing ones of these sessions, by id: up to 1,000 in one read."""

    @abstractmethod
    async def list_sessions(self, tenant: str | None, *, limit: int, offset: int) -> list[SessionRecord]:
        """Return sessions, newest first. `tenant` None lists every tenant's."""

    @abstractmethod
    async def walk_sessions(
        self, tenant: str | None, *, before: tuple[datetime, str] | None = None, limit: int
    ) -> list[SessionRecord]:
        """Return the sessions behind a position, newest first: what a page costs does not depend on where it is."""

    @abstractmethod
    async def count_live_sessions(self, tenant: str) -> int:
        """Return how many of a tenant's sessions have not ended."""

    @abstractmethod
    async def hear_session(self, session_id: str, at: datetime, *, server_id: str | None = None) -> SessionRecord:
        """Record a heartbeat, and which server heard it. A session that has ended stays as it is."""

    @abstractmethod
    async def update_session(
        self, session_id: str, *, project_id: str | None, by: Mapping[str, str] | None = None
    ) -> SessionRecord:
        """Move the session, with its runs and checkpoints, to another project, or to none."""

    @abstractmethod
    async def end_session(
        self, session_id: str, reason: SessionEnd, detail: str | None, *, by: Mapping[str, str] | None = None
    ) -> SessionRecord:
        """Record the end, and queue an UnloadModel behind each live model's last operation.

        The first reason wins.
        """

    @abstractmethod
    async def unload_run(self, model_id: str) -> str:
        """Queue an UnloadModel behind a model's last operation, and return its request_id; a repeat gets the first one.

        Later requests are refused, and what waits behind a missing seq_id fails. Raise UserError if the model is lost.
        """

    @abstractmethod
    async def forget_sessions(self, last_seen_before: datetime) -> int:
        """Delete sessions that have ended and were last heard before then, with all that they own.

        A sampling session is kept while the log holds samples of it; a model while it is live, or has operations in the
        log or checkpoints; a session while it has models or sampling sessions. Return how many sessions, models and
        sampling sessions were deleted.
        """

    @abstractmethod
    async def expire_sessions(self, last_seen_before: datetime, *, heard_by: str | None = None) -> list[str]:
        """End the sessions without a heartbeat since then, with reason "expired". Return their ids.

        With `heard_by`, only those that this server heard last, if several servers may share the store.
        """

    # models, which the REST API calls training runs

    @abstractmethod
    async def create_run(self, run: RunRecord, operation: NewOperation) -> str:
        """Insert the run and submit its creation (seq_id 0) in one transaction. Return the request_id.

        A repeat returns the first request_id.
        """

    @abstractmethod
    async def add_unloaded_run(self, run: RunRecord, origin: Origin | None = None) -> RunRecord:
        """Insert a model that only holds checkpoints: nothing can be submitted for it. A repeat returns the first.

        `origin`: of which checkpoint it holds a copy.
        """

    @abstractmethod
    async def count_live_models(self, tenant: str) -> int:
        """Return how many of a tenant's models are created or being created."""

    @abstractmethod
    async def get_run(self, model_id: str) -> RunRecord: ...

    @abstractmethod
    async def list_runs(
        self, tenant: str | None, *, session_id: str | None = None, limit: int, offset: int
    ) -> tuple[list[RunRecord], int]:
        """Return one page of runs, newest first, and the total number of runs."""

    # sampling sessions

    @abstractmethod
    async def create_sampling_session(self, sampler: SamplingSessionRecord) -> SamplingSessionRecord:
        """Insert the sampling session. A second call with the same sampling_session_id returns the first one."""

    @abstractmethod
    async def get_sampling_session(self, sampling_session_id: str) -> SamplingSessionRecord: ...

    @abstractmethod
    async def count_open_sampling_sessions(self, tenant: str) -> int:
        """Return how many sampling sessions a tenant has in sessions that have not ended."""

    @abstractmethod
    async def list_sampling_session_ids(self, session_id: str) -> list[str]:
        """Return the ids of a session's sampling sessions, oldest first: there may be a hundred thousand."""

    # what is known of checkpoints; their files are not the store's business

    @abstractmethod
    async def get_checkpoint(self, path: str) -> CheckpointRecord: ...

    @abstractmethod
    async def list_checkpoints(
        self, tenant: str | None, *, model_id: str | None = None, limit: int | None = None, offset: int = 0
    ) -> tuple[list[CheckpointRecord], int]:
        """Return one page of checkpoints, newest first, and the total number of checkpoints."""

    @abstractmethod
    async def walk_checkpoints(
        self, tenant: str | None, *, before: tuple[datetime, str] | None = None, limit: int
    ) -> list[CheckpointRecord]:
        """Return the checkpoints behind a position, newest first, as `walk_sessions` does."""

    @abstractmethod
    async def checkpoints_of_sessions(self, session_ids: Collection[str]) -> dict[str, KeptCheckpoints]:
        """Return how many checkpoints the models of each session have, and their size. Sessions without are left out.

        Up to 500 sessions in one read.
        """

    @abstractmethod
    async def newest_checkpoints(self, model_ids: Collection[str]) -> list[CheckpointRecord]:
        """Return the newest checkpoint of each kind of each of these models."""

    @abstractmethod
    async def recorded_directories(self, paths: Collection[str]) -> set[str]:
        """Return the directories of the checkpoints that exist."""

    @abstractmethod
    async def kept_checkpoints(self, tenant: str) -> KeptCheckpoints:
        """Return how many checkpoints a tenant has, and their size."""

    @abstractmethod
    async def add_checkpoint(self, record: CheckpointRecord) -> None:
        """Record a checkpoint that no operation has written. Raise UserError if its path is taken."""

    @abstractmethod
    async def update_checkpoint(
        self,
        path: str,
        change: Callable[[CheckpointRecord], CheckpointRecord],
        *,
        by: Mapping[str, str] | None = None,
    ) -> CheckpointRecord:
        """Replace `public` or `expires_at` atomically. `change` may raise to refuse the update."""

    @abstractmethod
    async def delete_checkpoint(self, path: str) -> CheckpointRecord: ...

    @abstractmethod
    async def delete_version(self, read: CheckpointRecord, *, by: Mapping[str, str] | None = None) -> CheckpointRecord:
        """Delete a checkpoint if it is still the version that was read, with the same expiry time.

        Raise NotFoundError if it is not. All in one transaction.
        """

    @abstractmethod
    async def deleted_checkpoint(self, path: str) -> CheckpointRecord:
        """Return a checkpoint that `delete_checkpoint` has deleted, until `prune` removes its last trace."""

    @abstractmethod
    async def expired_checkpoints(self, now: datetime) -> list[CheckpointRecord]:
        """Return the checkpoints whose time to live is over."""

    # the log, for servers: submit operations, and wait for their results

    @abstractmethod
    async def submit(self, operation: NewOperation) -> str:
        """Record the operation durably, and return its request_id.

        A repeat (same subject_id, seq_id and digest) returns the first request_id; another digest raises
        ConflictError. An operation that cannot run is recorded as failed at once: its model is lost, or its engine
        has been given up. The exception is an operation of a model that exists; it waits for the next engine.
        Raise NotFoundError if the model does not exist, UserError if its session has ended.
        """

    @abstractmethod
    async def get_operation(self, request_id: str) -> OperationRecord:
        """Raise ResultExpiredError if retention has removed the operation."""

    @abstractmethod
    async def wait_for(self, request_id: str, timeout_s: float) -> OperationRecord:
        """Return the operation as soon as it is finished, or as it stands after `timeout_s`."""

    @abstractmethod
    async def finished_samples(
        self, sampling_session_id: str, clone: int, *, after: int, limit: int, timeout_s: float
    ) -> FinishedSamples:
        """Return at most `limit` entries behind the cursor `after` (0 is the start), in order.

        If there are none yet, wait for one, up to `timeout_s`. An operation that succeeds, fails or is cancelled gets
        its place in the transaction that finishes it; if one transaction finishes several, they keep their order of
        arrival. Entries become visible in this order, whichever process finishes them, so nothing ever appears behind
        a cursor. An entry outlives its operation by hours: a client that was away learns that a result is gone
        instead of waiting for it. Raise UserError if the cursor is ahead of everything recorded.
        """

    @abstractmethod
    async def waiting(self, request_id: str) -> Waiting:
        """Return why the operation is still pending."""

    @abstractmethod
    async def pending(self, tenant: str) -> PendingCounts:
        """Return what a tenant has queued or running."""

    @abstractmethod
    async def list_pending(self) -> list[PendingWork]:
        """Return what is queued or running of all tenants, by base model, tenant, kind and state."""

    @abstractmethod
    async def next_requests(self) -> dict[str, str | datetime]:
        """Return the request_id of what comes next of each live model, by model_id, oldest model first.

        It is the first of the model's pending operations, or else the oldest pending sample that its tenant takes from
        its weights. If nothing is pending: when its last request arrived, or the last result was recorded, of the model
        or of its newest sampling session. The cost may depend on what is pending, but not on the length of the log.
        """

    @abstractmethod
    async def is_awaited(self, model_id: str, seq_id: int) -> bool:
        """Return whether operations of the model wait with a higher seq_id."""

    @abstractmethod
    async def cancel(self, request_id: str) -> OperationRecord:
        """Cancel an unordered operation that is queued or running; leave any other as it is."""

    # the log, for engines: claim operations, and record their results

    @abstractmethod
    async def claim(self, lease: Lease, *, training: ClaimRoom, samples: ClaimRoom) -> Claim:
        """Take operations that can run, as much as the rooms allow: some of every tenant that has work.

        Return at once, also if there are none. Of each model, the operations queued from `next_seq_id` on without a gap
        can run; samples always can. Of each tenant, the oldest operation is first. What this costs must depend neither
        on how much is waiting nor on what is missing.
        """

    @abstractmethod
    async def claim_suspect(self, lease: Lease) -> OperationRecord | None:
        """Take one operation that `requeue` has marked to run by itself, if there is one."""

    @abstractmethod
    async def complete(self, lease: Lease, completions: Sequence[Completion]) -> None:
        """Record results, effects and the models' applied positions in one transaction, and wake waiting calls.

        Operations that were cancelled in the meantime are skipped, and so are those that another engine has claimed. An
        operation whose effect SamplingSessionCreated finds its id taken fails, and has no effect.
        """

    @abstractmethod
    async def failed_pass(self, model_id: str, *, after_seq_id: int | None, before_seq_id: int) -> FailedPass | None:
        """Return the first forward_backward that failed between two operations of a model, for any reason.

        What `fail_gaps` has failed counts, of whichever kind: what never arrived may have been a pass. `after_seq_id`
        None: since the last operation that cleared the pending gradient, a succeeded optim_step or load_state, or the
        creation.
        """

    @abstractmethod
    async def cancelled(self, lease: Lease) -> list[str]:
        """Return the request_ids of claimed operations that were cancelled since the last call."""

    @abstractmethod
    async def fail_gaps(self, base_model: str, *, older_than: datetime) -> int:
        """Fail operations that have waited behind a missing seq_id since before `older_than`. Return how many failed.

        The error names the missing seq_id, and the model moves past it. No lease is needed: the decision depends on
        the log alone, and a model with a running operation is left as it is.
        """

    @abstractmethod
    async def wait_for_work(self, base_model: str, timeout_s: float) -> None:
        """Return when an operation may have become claimable or cancelled, or after `timeout_s`."""

    # places for models on an engine's backend, which holds a limited number of them. If none is free, the engine parks
    # a model that is idle: its state goes to disk, and it waits for a place again once it has a request

    @abstractmethod
    async def admit_models(self, lease: Lease, limits: PlaceLimits) -> PlaceMoves:
        """Give the free places to models that wait, and fail new ones that have waited for too long.

        A place is taken from the admission of a model until it is unloaded, lost or parked. The tenant with the fewest
        places is next, with the model that has waited longest. The last `limits.kept` places go only to tenants that
        have none. At most `limits.max_full_models` models with LoRA rank 0 have a place; one that waits for that holds
        up no other.

        New models are admitted in this call. The engine has to do the rest, before it calls this again: it brings back
        the parked models that have a place again, and parks idle ones for those that are still waiting.
        """

    @abstractmethod
    async def park_model(self, lease: Lease, point: RecoveryPointRecord, *, keep: int) -> bool:
        """Free the place of an idle model that goes on from `point`, registering it as `add_recovery_point` does.

        Return False, and change nothing, if the model is not READY, has anything queued or running, or has recorded
        results after the point. A repeat returns True.
        """

    @abstractmethod
    async def return_model(self, lease: Lease, model_id: str) -> bool:
        """Record that a parked model is on the backend again; what has arrived for it can be claimed.

        Return False if it has ended meanwhile. A repeat returns True.
        """

    @abstractmethod
    async def count_places(self, base_model: str) -> PlaceCounts:
        """Return how many models have a place, and how many wait for one."""

    @abstractmethod
    async def wait_for_places(self, base_model: str, timeout_s: float) -> None:
        """Return when a place may have become free or a model may have begun to wait, or after `timeout_s`."""

    # what a model's log holds, for people

    @abstractmethod
    async def run_log(self, model_id: str) -> RunLog:
        """Return where the model's log begins, and its recovery points."""

    @abstractmethod
    async def list_log(self, model_id: str, *, from_seq_id: int | None, limit: int) -> list[LoggedOperation]:
        """Return operations in order, from `from_seq_id` on; None returns the last ones."""

    @abstractmethod
    async def list_times(
        self, session_id: str, *, model_id: str | None = None, after: datetime | None = None, limit: int
    ) -> list[TimedOperation]:
        """Return the newest operations of a session, in order of arrival: of its models and its sampling sessions.

        `model_id`: of this model alone, and samples from it and from base models. `after`: those that finished before
        are left out.
        """

    @abstractmethod
    async def log_totals(self, model_id: str) -> list[LogTotals]:
        """Return one entry for each kind and state in the log, sorted by kind."""

    # leases: at most one engine of a base model records anything

    @abstractmethod
    async def acquire_lease(
        self, base_model: str, *, engine_id: str, duration_s: float, dead: str | None = None
    ) -> Lease | LeaseHeld:
        """Take the lease if it is free, was released, or has expired. It is durable, and its epoch only grows.

        `dead` names an engine known to have ended; its lease counts as released. An engine that already holds the
        lease renews it.
        """

    @abstractmethod
    async def renew_lease(self, lease: Lease) -> None:
        """Extend the lease to `duration_s` from now, even if it had expired but was not taken over.

        Raise LeaseLostError if another engine has taken it over, or if it was released.
        """

    @abstractmethod
    async def release_lease(self, base_model: str, engine_id: str) -> None:
        """Release the lease if this engine holds it, and wake the engines that wait for it."""

    @abstractmethod
    async def wait_for_lease(self, base_model: str, timeout_s: float) -> None:
        """Return when the lease may have been released, or after `timeout_s`."""

    # a starting engine: interrupted operations, and the models to rebuild and their sources

    @abstractmethod
    async def requeue(
        self,
        lease: Lease,
        *,
        max_attempts: int,
        reason: str | None,
        max_interruptions: int | None = None,
        held: frozenset[str] = frozenset(),
    ) -> list[str]:
        """Put running operations back into the queue. Return the request_ids of those that failed instead.

        `reason` describes the death of the engine before; None is an orderly stop, which counts as nothing. After a
        crash, any running operation may be its cause: operations of models, and samples with one attempt left, are
        marked to run alone. An operation that has used up `max_attempts` fails, and its model continues from the
        state before it. With `max_interruptions`, the engine was killed from outside: that counts as an interruption,
        not as an attempt. Operations in `held`, by request_id, are left running: an engine that did not receive the
        answer to a claim requeues everything else.
        """

    @abstractmethod
    async def live_models(self, base_model: str) -> list[LiveModel]:
        """Return the models that exist and are neither lost nor unloaded, oldest first."""

    @abstractmethod
    async def begin_rebuild(self, lease: Lease, model_id: str, *, interrupted: bool) -> int:
        """Count one more rebuild of the model. Return how many have begun since the last one that finished.

        With `interrupted`, the engine before was killed from outside, so the rebuild that it had begun is not counted.
        """

    @abstractmethod
    async def end_rebuild(self, lease: Lease, model_id: str) -> None:
        """Reset the count: the model is rebuilt."""

    @abstractmethod
    async def replayable(self, model_id: str, *, after_seq_id: int, limit: int) -> list[OperationRecord]:
        """Return the succeeded operations after `after_seq_id` in order, with payloads and results."""

    @abstractmethod
    async def add_recovery_point(self, lease: Lease, record: RecoveryPointRecord, *, keep: int) -> None:
        """Register a recovery point, and forget all but the newest `keep` of its model.

        Raise ServerError if the results up to its seq_id are not recorded yet, or if its model is no longer live.
        """

    @abstractmethod
    async def list_recovery_points(self, model_id: str) -> list[RecoveryPointRecord]:
        """Return the recovery points, newest first. A lost or unloaded model has none."""

    @abstractmethod
    async def drop_recovery_point(self, lease: Lease, model_id: str, seq_id: int) -> None:
        """Forget a recovery point that turned out to be damaged."""

    @abstractmethod
    async def lose_run(self, lease: Lease, model_id: str, reason: str) -> None:
        """Mark a model as lost, and fail its pending operations."""

    @abstractmethod
    async def note_run(self, lease: Lease, model_id: str, note: str) -> None:
        """Show `note` as the `state_reason` of a model that stays live."""

    # what each engine last reported of itself

    @abstractmethod
    async def report_engine(self, record: EngineRecord, *, lease: Lease | None = None) -> None:
        """Replace the record of the engine's base model.

        A report without a lease comes from a supervisor; it is ignored while an engine holds the lease. With a lease,
        raise LeaseLostError once another engine has taken it over.

        State FAILED fails everything pending for the base model, with `detail` in the error. Operations of models that
        exist are kept, and continue when an engine starts again.
        """

    @abstractmethod
    async def list_engines(self) -> list[EngineRecord]: ...

    @abstractmethod
    async def overdue_engines(self) -> dict[str, float]:
        """Return, by engine_id, how many seconds ago each lease ran out that was not released."""

    @abstractmethod
    async def running_since(self) -> dict[str, datetime]:
        """Return, by base model, when its engine took the oldest of the operations that it is running."""

    @abstractmethod
    async def report_figures(self, lease: Lease, report: bytes) -> None:
        """Replace what the engine of a base model counts: `tinsmith.figures.Report`, encoded.

        A power cut may undo it.
        """

    @abstractmethod
    async def list_figures(self) -> list[ReportedFigures]:
        """Return what each engine reported last, also one that has ended."""

    # what tenants keep

    @abstractmethod
    async def kept_bytes(self, tenant: str | None) -> list[KeptBytes]:
        """Return how many bytes a tenant keeps; None: each tenant that keeps any, by name."""

    # routing replay

    @abstractmethod
    async def find_routed_experts(self, tenant: str, model_id: str, digests: Sequence[bytes]) -> dict[bytes, bytes]:
        """Return what is kept of sequences that this tenant sampled from this model, by digest.

        `prune` deletes what was recorded before the time that it is given.
        """

    # curves: what passes, steps and clients measured, kept as long as its run

    @abstractmethod
    async def log_metrics(self, model_id: str, points: Sequence[Measured]) -> int:
        """Keep what a client logs. A value replaces the one with its step and name. Return `metric_bytes` of the run.

        Repeating a call changes nothing. Raise UserError if a step would have more than `MOST_NAMES` metrics.
        """

    @abstractmethod
    async def read_metrics(
        self, model_id: str, *, from_step: int = 0, after: int | None = None, limit: int
    ) -> list[MetricsRow]:
        """Return rows by step and seq_id, from a step on. `after`: of `from_step`, only rows with a larger seq_id."""

    @abstractmethod
    async def wait_for_metrics(self, model_id: str, *, known: int, timeout_s: float) -> int:
        """Return `metric_bytes` of the run once they are more than `known`, or after `timeout_s`."""

    # API keys made over HTTP

    @abstractmethod
    async def add_api_key(self, key: IssuedKey, *, by: Mapping[str, str] | None = None) -> None: ...

    @abstractmethod
    async def find_api_key(self, key_id: str) -> IssuedKey | None:
        """Return a key, expired or not; None if there is none."""

    @abstractmethod
    async def list_api_keys(self, tenant: str | None, *, limit: int, offset: int) -> list[IssuedKey]:
        """Return the keys of a tenant, or of all (None), newest first, expired ones as well."""

    @abstractmethod
    async def count_api_keys(self, tenant: str) -> int:
        """Return the number of a tenant's keys, expired ones as well."""

    @abstractmethod
    async def delete_api_key(self, key_id: str, *, tenant: str | None, by: Mapping[str, str] | None = None) -> bool:
        """Delete a key if it is the tenant's, or whoever's it is (None). Return whether it was there."""

    # browsers of people who have signed in: who they are stands in signed cookies, and here only who has signed out

    @abstractmethod
    async def end_login(
        self, login_id: str, *, tenant: str, until: datetime, by: Mapping[str, str] | None = None
    ) -> None:
        """Record that a login has ended, until it would have ended by itself. A repeat may only move that on."""

    @abstractmethod
    async def ended_login(self, login_id: str) -> datetime | None:
        """Return when an ended login would have ended by itself, None if it has not ended before. See `logins.py`."""

    # The audit log: sessions, checkpoints, share links and API keys that are made, changed or deleted, and who signs in
    # and out. The methods that do so write an entry in their transaction. `by` says who asked for it; None: the server,
    # or whoever operates it.

    @abstractmethod
    async def add_audit_entry(self, entry: AuditEntry) -> None:
        """Record what changes nothing else. A power cut may undo it."""

    @abstractmethod
    async def read_audit(
        self,
        tenant: str | None,
        *,
        since: datetime,
        until: datetime,
        resource: str | None = None,
        limit: int,
        offset: int = 0,
    ) -> list[AuditEntry]:
        """Return entries of a tenant, or of all (None), in order: from `since` on, before `until`.

        resource: only events that begin with it and an underscore.
        """

    @abstractmethod
    async def prune_audit(self, before: datetime) -> int:
        """Delete older entries. Return how many."""

    # lineage: which runs took their weights from which checkpoints, kept as long as the run that took them

    @abstractmethod
    async def origins_of(self, model_ids: Collection[str]) -> list[Origin]:
        """Return from where these runs took their weights, oldest first: up to 500 runs in one read."""

    @abstractmethod
    async def derived_from(self, model_ids: Collection[str]) -> list[Origin]:
        """Return what has been taken from checkpoints of these runs, oldest first: up to 500 runs in one read."""

    # rollouts: recorded with the pass that trained on them (RolloutsTrained), and kept as long as its run

    @abstractmethod
    async def log_rewards(self, model_id: str, step: int, rewards: Mapping[bytes, float], max_bytes: int) -> None:
        """Keep rewards of a step, by the digest of the sequence. One replaces the one with its digest.

        Repeating a call changes nothing. Raise UserError if a step would have more than `MOST_REWARDS`.
        """

    @abstractmethod
    async def rollout_steps(self, model_id: str) -> list[int]:
        """Return the steps of which rollouts are kept, in order."""

    @abstractmethod
    async def read_rollouts(self, model_id: str, step: int) -> list[RolloutsRow]:
        """Return the rows of a step by seq_id: first the client's rewards, if there are any."""

    @abstractmethod
    async def samples_of(
        self, model_id: str, *, after: datetime, until: datetime, max_bytes: int
    ) -> tuple[list[OperationRecord], bool]:
        """Return samples that the run's tenant took from its weights, oldest first, and whether there are more.

        They succeeded, and finished after `after` and until `until`. They come with payloads and results, of which all
        together take at most `max_bytes`.
        """

    # tokens on their way to a client that reads them while they are drawn

    async def tell_drawn(self, pieces: Sequence[DrawnTokens]) -> None:
        """Pass tokens on to all listeners, in this process and in the others."""
        del pieces

    def drawn(
        self, sampling_session_id: str, seq_id: int, hear: Callable[[DrawnTokens], None]
    ) -> AbstractContextManager[None]:
        """Call `hear` with the tokens told of a sample meanwhile, in the thread of the event loop.

        The sample may be submitted later.
        """
        del sampling_session_id, seq_id, hear
        return nullcontext()


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreContext:
    """What core passes to a store's `create` in addition to its config."""

    data_dir: Path
    shared: bool = False  # other servers use the directory, and this store, at the same time
    figures: Figures = field(default_factory=Figures)  # of this process: a store may time its commits there
    tables: Mapping[str, Tables] = field(default_factory=dict)  # of packages, by the names of their specs


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreSpec(Generic[_Config]):
    """An offer of a store. `create` does no I/O; `open` does."""

    name: str
    config: type[_Config]
    create: Callable[[_Config, StoreContext], RequestStore]
    description: str = ""
    hold: Callable[[_Config, StoreContext], AbstractContextManager[None]] | None = None
    """What a server enters before it creates the store, and leaves after it has closed it: the store ends with it."""
    diagnose: Callable[[_Config, StoreContext], str] | None = None
    """Look at the store without changing it, before each start of a server and for `tinsmith doctor`.

    Return what it is and how it does, in a line. Raise ConfigError if it cannot be opened as configured, StoreError if
    it cannot be reached for now.
    """
