"""The rows of a store in memory, and the rules of its log.

Nothing here waits, and everything is called under `Memory.lock`, so each method of the store is one transaction.
Methods refuse before they change anything, so a transaction that raises has no effect. What waits is scanned: what a
claim costs grows with it.
"""

import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from typing import Any

from tinsmith.operations import Failed, Result, UnloadModel
from tinsmith.store import (
    WAITS_FOR_PLACE,
    AuditEntry,
    CheckpointRecord,
    EngineRecord,
    EngineState,
    FinishedSample,
    IssuedKey,
    Lease,
    Measured,
    MetricsRow,
    NewOperation,
    OperationRecord,
    OperationState,
    Origin,
    RecoveryPointRecord,
    ReportedFigures,
    RolloutsRow,
    RunRecord,
    RunState,
    SamplingSessionRecord,
    SessionRecord,
    ShareLink,
    refusals,
)
from tinsmith.store.codec import encode_operation, encode_result, kind_of
from tinsmith.store.metrics import encode_values, row_bytes
from tinsmith.store.records import SILENCE
from tinsmith.store.request_ids import new_request_id
from tinsmith.store.rollouts import row_bytes as rollout_bytes
from tinsmith.store.shares import Applicant, Idle, Taken
from tinsmith.store.wakeups import done_topic, metrics_topic, places_topic, samples_topic, work_topic


@dataclass(slots=True)
class Operation:
    """An operation. `record` has its payload, and its result once it is finished."""

    record: OperationRecord
    id: int  # the order of arrival
    arrival: int  # orders what a tenant has waiting, never against the order of a model
    digest: bytes
    engine_id: str | None = None
    attempts: int = 0
    interruptions: int = 0
    alone: bool = False  # an engine died while it ran, so the next attempt runs by itself
    behind_a_gap: bool = False  # it failed there
    ran_at: datetime | None = None
    run_s: float | None = None
    first_token_s: float | None = None

    @property
    def is_queued(self) -> bool:
        return self.record.state is OperationState.QUEUED

    @property
    def is_running(self) -> bool:
        return self.record.state is OperationState.RUNNING

    @property
    def size(self) -> int:
        return len(self.record.payload or b"") + len(self.record.result or b"")


@dataclass(slots=True)
class Run:
    """A model."""

    record: RunRecord
    arrived: int  # up to here no seq_id is missing, and queued operations can run
    pruned: int = -1  # the highest seq_id that retention has removed
    unload: int | None = None  # the seq_id of the UnloadModel, once the session has ended
    rebuilds: int = 0  # begun and not finished
    metrics: dict[tuple[int, int], MetricsRow] = field(default_factory=dict)  # by step and seq_id
    origins: dict[int, Origin] = field(default_factory=dict)  # by seq_id
    share_links: dict[str, ShareLink] = field(default_factory=dict)  # by id
    rollouts: dict[tuple[int, int], RolloutsRow] = field(default_factory=dict)  # by step and seq_id

    @property
    def is_live(self) -> bool:
        return self.record.state in (RunState.CREATING, RunState.READY, RunState.PARKED)

    @property
    def waits_for_place(self) -> bool:
        return self.record.next_seq_id == WAITS_FOR_PLACE and self.record.state is RunState.CREATING

    @property
    def is_parked(self) -> bool:
        return self.record.state is RunState.PARKED

    @property
    def has_no_place(self) -> bool:
        return self.waits_for_place or self.is_parked

    def change(self, **changes: Any) -> None:  # Any: fields of the record
        self.record = replace(self.record, **changes)


@dataclass(slots=True)
class Session:
    record: SessionRecord
    idempotency_key: str | None
    heard_since: datetime  # heartbeats have arrived all the time since then


@dataclass(slots=True)
class LeaseRow:
    epoch: int
    engine_id: str | None  # None: released
    expires_at: datetime


@dataclass(slots=True)
class Samples:
    """The finished samples of one client, in order, with their numbers, from 1, and their times."""

    last: int = 0
    entries: list[tuple[int, FinishedSample, datetime]] = field(default_factory=list)


class Memory:
    """The rows that the stores of one process share across event loops."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.told: list[str] = []  # the topics that the running transaction tells
        self.tell_all: list[Callable[[list[str]], None]] = []  # who is told, from any thread
        self.sessions: dict[str, Session] = {}
        self.runs: dict[str, Run] = {}
        self.samplers: dict[str, SamplingSessionRecord] = {}
        self.custom_losses: dict[tuple[str, int], bytes] = {}  # by session and number
        self.checkpoints: dict[str, CheckpointRecord] = {}
        self.deleted_checkpoints: dict[str, tuple[CheckpointRecord, datetime]] = {}
        self.operations: dict[str, Operation] = {}
        self.unfinished: dict[str, Operation] = {}  # in order of arrival
        self.of_subject: dict[str, dict[int, Operation]] = {}  # none is empty
        self.samples: dict[tuple[str, int], Samples] = {}  # by sampling session and clone
        self.untold: defaultdict[str, list[str]] = defaultdict(list)  # cancelled while they ran, by base model
        self.leases: dict[str, LeaseRow] = {}
        self.engines: dict[str, EngineRecord] = {}
        self.figures: dict[str, ReportedFigures] = {}
        self.recovery_points: dict[str, dict[int, RecoveryPointRecord]] = {}
        self.usage: defaultdict[tuple[datetime, str, str], Counter[str]] = defaultdict(Counter)
        self.audit: list[AuditEntry] = []
        self.api_keys: dict[str, IssuedKey] = {}  # by id
        self.experts: dict[tuple[str, str, bytes], tuple[bytes, datetime]] = {}  # oldest first
        self.secrets: dict[str, bytes] = {}
        self.pruned_before: datetime | None = None
        self._last_id = 0

    # finding rows

    def session(self, session_id: str) -> Session:
        if session_id not in self.sessions:
            raise refusals.missing("session", session_id)
        return self.sessions[session_id]

    def run(self, model_id: str) -> Run:
        if model_id not in self.runs:
            raise refusals.missing("model", model_id)
        return self.runs[model_id]

    def operation(self, request_id: str) -> Operation:
        if request_id not in self.operations:
            raise refusals.no_request(request_id, self.pruned_before)
        return self.operations[request_id]

    def checkpoint(self, path: str) -> CheckpointRecord:
        if path not in self.checkpoints:
            raise refusals.no_checkpoint(path)
        return self.checkpoints[path]

    def log(self, subject_id: str) -> dict[int, Operation]:
        """Return the operations of a model or sampling session by seq_id, to read."""
        return self.of_subject.get(subject_id, {})

    def pending(self, subject_id: str) -> list[Operation]:
        """Return what a model has queued or running, in order."""
        found = [each for each in self.unfinished.values() if each.record.subject_id == subject_id]
        return sorted(found, key=lambda each: each.record.seq_id)

    # submitting

    def submit(self, new: NewOperation) -> str:
        run = self.run(new.subject_id) if new.ordered else None
        same = self.log(new.subject_id).get(new.seq_id)
        if same is not None and same.digest == new.digest:
            return same.record.request_id
        if same is not None:
            if run is not None:  # an UnloadModel may have been queued under this seq_id
                self.refuse_ended(run.record.session_id)
                self.refuse_unloaded(run)
            raise refusals.used_already(new)
        failed = self._hopeless(new, run) or new.refused
        row = self.insert(new, run, payload=new.payload if failed is None else None)
        if failed is not None:
            self.finish(row, failed)
            if run is not None and run.record.state is RunState.CREATING and new.seq_id == 0:
                run.change(state=RunState.LOST, state_reason=failed.message)
        if run is not None:
            run.change(last_request_at=row.record.created_at)
        parked = run is not None and run.is_parked
        self.told.append((places_topic if parked else work_topic)(new.base_model))
        return row.record.request_id

    def refuse_ended(self, session_id: str) -> None:
        session = self.sessions.get(session_id)
        if session is not None and session.record.ended is not None:
            raise refusals.session_ended(session_id, session.record.ended, session.record.end_detail)

    def refuse_unloaded(self, run: Run) -> None:
        if run.unload is not None:
            raise refusals.unloaded(run.record.model_id)

    def _hopeless(self, new: NewOperation, run: Run | None) -> Failed | None:
        """Return why an operation can never run, or None. Raise if it cannot even be recorded."""
        if run is not None:
            if new.seq_id <= run.pruned:
                raise refusals.pruned_already(new)
            self.refuse_ended(run.record.session_id)
            self.refuse_unloaded(run)
            if new.seq_id < run.record.next_seq_id:
                return refusals.too_late(new, run.record.next_seq_id)
            if run.record.state is RunState.LOST:
                return refusals.lost(run.record.model_id, run.record.state_reason)
            if run.record.state in (RunState.READY, RunState.PARKED):
                return None  # waits for the next engine if this one has been given up
        engine = self.engines.get(new.base_model)
        if engine is not None and engine.state is EngineState.FAILED:
            return refusals.no_engine(new.base_model, engine.detail)
        return None

    def insert(self, new: NewOperation, run: Run | None, *, payload: bytes | None) -> Operation:
        now = datetime.now(UTC)
        self._last_id += 1
        before = self.log(new.subject_id).get(new.seq_id - 1) if new.ordered else None
        record = OperationRecord(
            request_id=new_request_id(now),
            base_model=new.base_model,
            kind=new.kind,
            tenant=new.tenant,
            session_id=new.session_id,
            subject_id=new.subject_id,
            seq_id=new.seq_id,
            ordered=new.ordered,
            num_tokens=new.num_tokens,
            num_bytes=new.num_bytes,
            state=OperationState.QUEUED,
            created_at=now,
            payload=payload,
            traceparent=new.traceparent,
        )
        arrival = self._last_id if before is None else max(self._last_id, before.arrival)
        row = Operation(record, self._last_id, arrival, new.digest)
        self.operations[record.request_id] = self.unfinished[record.request_id] = row
        self.of_subject.setdefault(new.subject_id, {})[new.seq_id] = row
        if run is not None and new.seq_id == run.arrived + 1 and (not run.is_parked or new.seq_id == run.unload):
            self.follow(run)  # to unload a parked model, it may stay away
        return row

    def follow(self, run: Run) -> None:
        """Move `arrived` over everything that is there. What waited for the missing one arrives with it."""
        rows, first = self.log(run.record.model_id), run.arrived + 1
        while run.arrived + 1 in rows and (run.unload is None or run.arrived < run.unload):
            run.arrived += 1
        moved = [rows[seq_id] for seq_id in range(first, run.arrived + 1)]
        arrival = max((each.arrival for each in moved), default=0)
        for each in moved:
            each.arrival = arrival

    # finishing

    def finish(self, row: Operation, result: Result, state: OperationState | None = None) -> None:
        """Record the result of an operation that was queued or running, and wake who waits for it."""
        now, (kind, encoded) = datetime.now(UTC), encode_result(result)
        if state is None:
            state = OperationState.FAILED if isinstance(result, Failed) else OperationState.SUCCEEDED
        row.record = replace(row.record, state=state, finished_at=now, result_kind=kind, result=encoded)
        request_id, subject_id = row.record.request_id, row.record.subject_id
        del self.unfinished[request_id]
        self.told.append(done_topic(request_id))
        if not row.record.ordered:
            clone = row.record.seq_id // FinishedSample.SEQ_IDS_PER_CLONE
            samples = self.samples.setdefault((subject_id, clone), Samples())
            samples.last += 1
            succeeded = state is OperationState.SUCCEEDED
            notice = FinishedSample(request_id=request_id, succeeded=succeeded, size_bytes=len(encoded))
            samples.entries.append((samples.last, notice, now))
            self.told.append(samples_topic(subject_id, clone))

    def lose(self, run: Run, reason: str, failure: Failed | None = None) -> None:
        """Lose a model, and fail what it has pending."""
        run.change(state=RunState.LOST, state_reason=reason)
        self.ended(run)
        for row in self.pending(run.record.model_id):
            self.finish(row, failure or refusals.lost(run.record.model_id, reason))

    def ended(self, run: Run) -> None:
        """A model is no longer live, so its place is free."""
        self.recovery_points.pop(run.record.model_id, None)
        self.told.append(places_topic(run.record.base_model))

    def measure(self, run: Run, seq_id: int, measured: Measured) -> None:
        """Keep a row of metrics, in place of the one with its step and seq_id."""
        row = MetricsRow(step=measured.step, seq_id=seq_id, time=datetime.now(UTC), values=dict(measured.values))
        run.metrics[row.step, row.seq_id] = row
        more = row_bytes(run.record.model_id, encode_values(row.values))
        run.change(metric_bytes=run.record.metric_bytes + more)
        self.told.append(metrics_topic(run.record.model_id))

    def keep_rollouts(self, run: Run, row: RolloutsRow, max_bytes: int) -> None:
        """Keep a row of rollouts, in place of the one with its step and seq_id; drop the oldest ones if necessary."""
        run.rollouts[row.step, row.seq_id] = row
        sizes = {key: rollout_bytes(run.record.model_id, each.content) for key, each in sorted(run.rollouts.items())}
        total = sum(sizes.values())
        for key, size in sizes.items():
            if total > max_bytes:
                del run.rollouts[key]
                total -= size
        run.change(rollout_bytes=total)

    # the audit log

    def note(self, tenant: str, event: str, by: Mapping[str, str] | None, **details: str) -> None:
        entry = AuditEntry(at=datetime.now(UTC), tenant=tenant, event=event, details={**details, **(by or {})})
        self.audit.append(entry)

    # gaps, and the end of a session

    def fail_gap(self, run: Run, older_than: datetime | None) -> int:
        """Fail what waits behind a missing seq_id for ever, or has waited since before then. Return how many failed."""
        pending = self.pending(run.record.model_id)
        early = [each for each in pending if each.record.seq_id > run.arrived]
        if run.unload is not None or not run.is_live:
            missing = run.arrived + 1 if run.unload is None else run.unload
            return self._fail_behind(run, missing, [each for each in early if each.record.seq_id > missing])
        late = [] if older_than is None else [each for each in early if each.record.created_at < older_than]
        if older_than is None or not late or run.has_no_place or not self._was_heard(run, older_than):
            return 0
        if any(run.record.applied_seq_id < each.record.seq_id <= run.arrived for each in pending):
            return 0  # if one of them were requeued, the model would reach the gap again
        last = late[-1].record.seq_id
        failed = self._fail_behind(run, run.arrived + 1, [each for each in early if each.record.seq_id <= last])
        run.change(next_seq_id=last + 1, applied_seq_id=last)
        run.arrived = last
        self.follow(run)
        self.told.append(work_topic(run.record.base_model))
        return failed

    def _was_heard(self, run: Run, since: datetime) -> bool:
        """Return whether heartbeats of the client have arrived all the time, so that it could send what is missing."""
        session = self.sessions.get(run.record.session_id)
        silent_since = datetime.now(UTC) - SILENCE
        return session is None or (session.heard_since < since and session.record.last_seen_at >= silent_since)

    def _fail_behind(self, run: Run, missing: int, rows: list[Operation]) -> int:
        model_id, state = run.record.model_id, run.record.state
        if state is RunState.LOST:
            failure = refusals.lost(model_id, run.record.state_reason)
        else:
            failure = refusals.behind_a_gap(model_id, missing, state, unloads=run.unload == missing)
        for row in rows:
            row.behind_a_gap = True
            self.finish(row, failure)
        return len(rows)

    def unload(self, run: Run) -> str:
        """Queue an UnloadModel under the first missing seq_id, and return its request_id; of a repeat, the first one's.

        Nothing fills that gap, so what is behind it fails.
        """
        rows = self.log(run.record.model_id)
        if run.unload is not None:
            if run.unload not in rows:  # its result is no longer kept
                raise refusals.unloaded(run.record.model_id)
            return rows[run.unload].record.request_id
        run.unload = 0 if run.waits_for_place else max(run.arrived + 1, run.record.next_seq_id)
        while run.unload in rows:
            run.unload += 1
        unload = UnloadModel(model_id=run.record.model_id)
        new = NewOperation(
            base_model=run.record.base_model,
            kind=kind_of(unload),
            tenant=run.record.tenant,
            session_id=run.record.session_id,
            subject_id=run.record.model_id,
            seq_id=run.unload,
            ordered=True,
            payload=encode_operation(unload),
            digest=b"",
        )
        row = self.insert(new, run, payload=new.payload)
        self.told.append(work_topic(run.record.base_model))
        return row.record.request_id

    # engines

    def fence(self, lease: Lease) -> None:
        """Raise LeaseLostError if another engine has taken the lease over. Renew the lease if it has expired."""
        row, now = self.leases.get(lease.base_model), datetime.now(UTC)
        if row is None or (row.epoch, row.engine_id) != (lease.epoch, lease.engine_id):
            raise refusals.lease_lost(lease, row.engine_id if row else None, row.epoch if row else None)
        if row.expires_at <= now:
            self.extend(lease)

    def extend(self, lease: Lease) -> None:
        until = datetime.now(UTC) + timedelta(seconds=lease.duration_s)
        self.leases[lease.base_model] = LeaseRow(lease.epoch, lease.engine_id, until)

    def ready(self, base_model: str) -> Iterator[Operation]:
        """Yield what an engine could claim."""
        for row in self.unfinished.values():
            if row.is_queued and row.record.base_model == base_model:
                run = self.runs.get(row.record.subject_id) if row.record.ordered else None
                if run is None or row.record.seq_id <= run.arrived:
                    yield row

    def start(self, row: Operation, lease: Lease) -> OperationRecord:
        row.record = replace(row.record, state=OperationState.RUNNING, started_at=datetime.now(UTC))
        row.engine_id = lease.engine_id
        row.attempts += 1
        if row.record.ordered:
            self.runs[row.record.subject_id].change(next_seq_id=row.record.seq_id + 1)
        return row.record

    def keep_newest(self, record: RecoveryPointRecord, keep: int) -> None:
        points = self.recovery_points.setdefault(record.model_id, {})
        points[record.seq_id] = record
        for seq_id in sorted(points)[:-keep]:
            del points[seq_id]

    def newest_points(self, model_id: str) -> tuple[RecoveryPointRecord, ...]:
        points = self.recovery_points.get(model_id, {})
        return tuple(points[seq_id] for seq_id in sorted(points, reverse=True))

    def places(self, base_model: str) -> tuple[Taken, list[Applicant]]:
        """Return the places that are taken, and the models that wait, longest first."""
        live = [each for each in self.runs.values() if each.record.base_model == base_model and each.is_live]
        live.sort(key=lambda each: (each.record.created_at, each.record.model_id))
        with_place = [each.record for each in live if each.record.next_seq_id != WAITS_FOR_PLACE and not each.is_parked]
        full = sum(each.lora.rank == 0 for each in with_place)
        waiting = [(each, each.record.created_at) for each in live if each.record.next_seq_id == WAITS_FOR_PLACE]
        for each in live:
            pending = self.pending(each.record.model_id) if each.is_parked else []
            if early := [row.record for row in pending if row.record.seq_id > each.arrived]:
                waiting.append((each, min(record.created_at for record in early)))
        applicants = [
            Applicant(
                run.record.model_id,
                run.record.tenant,
                since,
                full=run.record.lora.rank == 0,
                parked=run.is_parked,
            )
            for run, since in waiting
        ]
        applicants.sort(key=lambda each: each.since)
        return Taken(Counter(each.tenant for each in with_place), full), applicants

    def idle(self, base_model: str, before: datetime) -> list[Idle]:
        """Return the models that have had nothing to do since before then."""
        found = []
        for run in self.runs.values():
            record = run.record
            if record.base_model == base_model and record.state is RunState.READY and not self.pending(record.model_id):
                last = self.log(record.model_id).get(record.applied_seq_id)
                finished_at = None if last is None else last.record.finished_at
                since = max(record.last_request_at, finished_at or record.last_request_at)
                session = self.sessions.get(record.session_id)
                abandoned = session is not None and session.record.last_seen_at < datetime.now(UTC) - SILENCE
                if since <= before:
                    full, seq_id = record.lora.rank == 0, record.applied_seq_id
                    found.append(Idle(record.model_id, record.tenant, since, seq_id, full=full, abandoned=abandoned))
        return found
