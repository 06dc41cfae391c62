"""MemoryStore: the request store in memory. Each method is one transaction; those that wait say so with `async`."""

import asyncio
import secrets
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Coroutine, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from functools import partial, wraps
from typing import Any, Concatenate, Final, ParamSpec, TypeVar

from tinsmith.errors import StoreError, UserError
from tinsmith.memory_store.memory import LeaseRow, Memory, Operation, Run, Samples, Session
from tinsmith.operations import INFLIGHT, Failed
from tinsmith.store import (
    AuditEntry,
    CheckpointKind,
    CheckpointRecord,
    CheckpointWritten,
    Claim,
    Claimable,
    ClaimRoom,
    Completion,
    DrawnTokens,
    Effect,
    EngineRecord,
    EngineState,
    ExpertsSampled,
    FailedPass,
    FinishedSamples,
    IssuedKey,
    KeptBytes,
    KeptCheckpoints,
    Lease,
    LeaseHeld,
    LiveModel,
    LoggedOperation,
    LogTotals,
    LoraResolved,
    Measured,
    MetricsRow,
    NewOperation,
    OperationRecord,
    OperationState,
    Origin,
    PendingCounts,
    PendingWork,
    PlaceCounts,
    PlaceLimits,
    PlaceMoves,
    Position,
    RecoveryPointRecord,
    RecoveryPointTaken,
    ReportedFigures,
    RequestStore,
    RolloutsRow,
    RolloutsTrained,
    RunLog,
    RunRecord,
    RunState,
    RunStateChanged,
    SamplingSessionCreated,
    SamplingSessionRecord,
    SessionEnd,
    SessionRecord,
    ShareLink,
    StoredCheckpoints,
    TimedOperation,
    UsageRecord,
    Waiting,
    refusals,
)
from tinsmith.store.audit import changes_of
from tinsmith.store.codec import decode_result
from tinsmith.store.metrics import merged
from tinsmith.store.records import CLEARING, OF_CLIENT, PASS, SILENCE
from tinsmith.store.refusals import refuse_large_metadata
from tinsmith.store.rollouts import with_rewards
from tinsmith.store.shares import decide, place_wait
from tinsmith.store.wakeups import (
    WakeUps,
    done_topic,
    drawn_topic,
    lease_topic,
    message,
    metrics_topic,
    places_topic,
    samples_topic,
    work_topic,
)

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")

_FINISHED: Final = (OperationState.SUCCEEDED, OperationState.FAILED, OperationState.CANCELLED)
_SAMPLES_KEPT_LONGER: Final = timedelta(hours=3)  # the SDK asks for the samples of a client for up to two hours


def _transaction(
    method: Callable[Concatenate["MemoryStore", P], T],
) -> Callable[Concatenate["MemoryStore", P], Coroutine[Any, Any, T]]:
    """Run the method alone, then wake the waiters for its changes."""

    @wraps(method)
    async def run(store: "MemoryStore", /, *args: P.args, **options: P.kwargs) -> T:
        return store.transact(partial(method, store, *args, **options))

    return run


class MemoryStore(RequestStore):
    """One event loop's view of a `Memory`: stores over the same one are to each other as processes on a database."""

    def __init__(self, memory: Memory, *, max_value_bytes: int = 256 << 20) -> None:
        self._memory = memory
        self._max_value_bytes = max_value_bytes
        self._wakeups = WakeUps()
        self._loop: asyncio.AbstractEventLoop | None = None

    @property
    def max_value_bytes(self) -> int:
        return self._max_value_bytes

    async def open(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._memory.tell_all.append(self._tell)

    async def close(self) -> None:
        self._wakeups.unsubscribe()
        if self._loop is not None:
            self._memory.tell_all.remove(self._tell)
            self._loop = None

    def transact(self, work: Callable[[], T]) -> T:
        if self._loop is None:
            msg = "the request store is closed"
            raise StoreError(msg)
        with self._memory.lock:
            try:
                return work()
            finally:
                topics, self._memory.told = self._memory.told, []
                for tell in list(self._memory.tell_all) if topics else ():
                    tell(topics)

    def _tell(self, topics: list[str]) -> None:
        """Wake what waits here, from any thread."""
        loop = self._loop
        if loop is not None and not loop.is_closed():
            loop.call_soon_threadsafe(self._wakeups.wake, topics)

    # sessions

    @_transaction
    def create_session(
        self, session: SessionRecord, *, idempotency_key: str | None, by: Mapping[str, str] | None = None
    ) -> SessionRecord:
        refuse_large_metadata(session.user_metadata)
        key = session.tenant, idempotency_key
        for each in self._memory.sessions.values() if idempotency_key is not None else ():
            if (each.record.tenant, each.idempotency_key) == key:
                return each.record
        self._memory.sessions[session.session_id] = Session(session, idempotency_key, session.created_at)
        self._memory.note(session.tenant, "session_create", by, session_id=session.session_id)
        return session

    @_transaction
    def get_session(self, session_id: str) -> SessionRecord:
        return self._memory.session(session_id).record

    @_transaction
    def find_sessions(self, session_ids: Collection[str]) -> dict[str, SessionRecord]:
        known = self._memory.sessions
        return {each: known[each].record for each in session_ids if each in known}

    @_transaction
    def list_sessions(self, tenant: str | None, *, limit: int, offset: int) -> list[SessionRecord]:
        found = [each.record for each in self._memory.sessions.values() if tenant in (None, each.record.tenant)]
        found.sort(key=lambda each: (each.created_at, each.session_id), reverse=True)
        return found[offset : offset + limit]

    @_transaction
    def walk_sessions(self, tenant: str | None, *, before: Position | None = None, limit: int) -> list[SessionRecord]:
        found = [each.record for each in self._memory.sessions.values() if tenant in (None, each.record.tenant)]
        return _behind(before, {(each.created_at, each.session_id): each for each in found})[:limit]

    @_transaction
    def count_live_sessions(self, tenant: str) -> int:
        sessions = (each.record for each in self._memory.sessions.values())
        return sum(each.tenant == tenant and each.ended is None for each in sessions)

    @_transaction
    def hear_session(self, session_id: str, at: datetime, *, server_id: str | None = None) -> SessionRecord:
        session = self._memory.session(session_id)
        if session.record.ended is None:
            if session.record.last_seen_at < at - SILENCE:
                session.heard_since = at
            if session.record.last_seen_at < at:
                session.record = replace(session.record, last_seen_at=at, heard_by=server_id)
        return session.record

    @_transaction
    def update_session(self, session_id: str, *, project_id: str | None) -> SessionRecord:
        session = self._memory.session(session_id)
        session.record = replace(session.record, project_id=project_id)
        return session.record

    @_transaction
    def end_session(
        self, session_id: str, reason: SessionEnd, detail: str | None, *, by: Mapping[str, str] | None = None
    ) -> SessionRecord:
        return self._end(self._memory.session(session_id), reason, detail, by)

    @_transaction
    def unload_run(self, model_id: str) -> str:
        run = self._memory.run(model_id)
        if run.unload is None and not run.is_live:
            raise UserError(refusals.lost(model_id, run.record.state_reason).message)
        request_id = self._memory.unload(run)
        self._memory.fail_gap(run, None)
        return request_id

    def _end(
        self, session: Session, reason: SessionEnd, detail: str | None, by: Mapping[str, str] | None = None
    ) -> SessionRecord:
        if session.record.ended is None:
            record = session.record
            self._memory.note(record.tenant, "session_end", by, session_id=record.session_id, reason=reason)
            session.record = replace(session.record, ended=reason, end_detail=detail)
            for run in self._memory.runs.values():
                if run.record.session_id == session.record.session_id:
                    if run.is_live:
                        self._memory.unload(run)
                    self._memory.fail_gap(run, None)
        return session.record

    @_transaction
    def expire_sessions(self, last_seen_before: datetime, *, heard_by: str | None = None) -> list[str]:
        del heard_by  # no other server shares this store
        open_ones = [each for each in self._memory.sessions.values() if each.record.ended is None]
        expired = [each for each in open_ones if each.record.last_seen_at < last_seen_before]
        for session in expired:
            self._end(session, "expired", f"no heartbeat since {session.record.last_seen_at:%Y-%m-%d %H:%M:%S} UTC")
        return [each.record.session_id for each in expired]

    @_transaction
    def forget_sessions(self, last_seen_before: datetime) -> int:
        memory = self._memory
        old = {
            each.record.session_id
            for each in memory.sessions.values()
            if each.record.ended is not None and each.record.last_seen_at < last_seen_before
        }
        logged = set(memory.of_subject)
        sampled = {subject_id for (subject_id, _), samples in memory.samples.items() if samples.entries}
        saved = {each.model_id for each in (*memory.checkpoints.values(), *self._deleted())}
        samplers = [key for key, each in memory.samplers.items() if each.session_id in old - logged - sampled]
        samplers = [key for key in samplers if key not in logged | sampled]
        runs = [key for key, run in memory.runs.items() if run.record.session_id in old and not run.is_live]
        runs = [key for key in runs if key not in logged | saved]
        for key in samplers:
            del memory.samplers[key]
        for key in runs:
            del memory.runs[key]
        used = {run.record.session_id for run in memory.runs.values()}
        used |= {each.session_id for each in memory.samplers.values()}
        for key in old - used:
            del memory.sessions[key]
        for session_id, number in [key for key in memory.custom_losses if key[0] in old - used]:
            del memory.custom_losses[session_id, number]
        for subject_id, clone in [key for key in memory.samples if key[0] in samplers]:
            del memory.samples[subject_id, clone]
        return len(samplers) + len(runs) + len(old - used)

    # models

    @_transaction
    def create_run(self, run: RunRecord, operation: NewOperation) -> str:
        refuse_large_metadata(run.user_metadata)
        if run.model_id not in self._memory.runs:
            self._memory.refuse_ended(run.session_id)
            self._memory.runs[run.model_id] = Run(run, arrived=run.next_seq_id - 1)
            self._memory.told.append(places_topic(run.base_model))
        return self._memory.submit(operation)

    @_transaction
    def add_unloaded_run(self, run: RunRecord, origin: Origin | None = None) -> RunRecord:
        """Its UnloadModel counts as queued, so all operations are refused."""
        unloaded = Run(run, arrived=run.next_seq_id - 1, unload=run.next_seq_id)
        if origin is not None:
            unloaded.origins[origin.seq_id] = origin
        return self._memory.runs.setdefault(run.model_id, unloaded).record

    @_transaction
    def count_live_models(self, tenant: str) -> int:
        return sum(each.record.tenant == tenant and each.is_live for each in self._memory.runs.values())

    @_transaction
    def get_run(self, model_id: str) -> RunRecord:
        return self._memory.run(model_id).record

    @_transaction
    def list_runs(
        self, tenant: str | None, *, session_id: str | None = None, limit: int, offset: int
    ) -> tuple[list[RunRecord], int]:
        found = [each.record for each in self._memory.runs.values() if tenant in (None, each.record.tenant)]
        found = [each for each in found if session_id in (None, each.session_id)]
        found.sort(key=lambda each: (each.created_at, each.model_id), reverse=True)
        return found[offset : offset + limit], len(found)

    @_transaction
    def admit_models(self, lease: Lease, limits: PlaceLimits) -> PlaceMoves:
        memory = self._memory
        memory.fence(lease)
        taken, waiting = memory.places(lease.base_model)
        decided = decide(waiting, taken, limits, partial(memory.idle, lease.base_model))
        for model_id in decided.admitted:
            run = memory.run(model_id)
            run.change(next_seq_id=0)
            run.arrived = -1
            memory.follow(run)
        for model_id in decided.late:
            failure = Failed(message=limits.failure, category="server")
            memory.lose(memory.run(model_id), limits.failure, failure)
        if decided.admitted:
            memory.told.append(work_topic(lease.base_model))
        return decided.moves

    @_transaction
    def park_model(self, lease: Lease, point: RecoveryPointRecord, *, keep: int) -> bool:
        memory = self._memory
        memory.fence(lease)
        run = memory.runs.get(point.model_id)
        if run is None or run.record.state is not RunState.READY:
            return run is not None and run.is_parked
        if memory.pending(point.model_id) or run.record.applied_seq_id != point.seq_id:
            return False
        memory.keep_newest(point, keep)
        run.change(state=RunState.PARKED)
        memory.told.append(places_topic(run.record.base_model))
        return True

    @_transaction
    def return_model(self, lease: Lease, model_id: str) -> bool:
        memory = self._memory
        memory.fence(lease)
        run = memory.runs.get(model_id)
        if run is None or not run.is_parked:
            return run is not None and run.record.state is RunState.READY
        run.change(state=RunState.READY)
        memory.follow(run)
        memory.told.append(work_topic(run.record.base_model))
        return True

    @_transaction
    def count_places(self, base_model: str) -> PlaceCounts:
        taken, waiting = self._memory.places(base_model)
        return PlaceCounts(taken=taken.by_tenant.total(), waiting=len(waiting))

    async def wait_for_places(self, base_model: str, timeout_s: float) -> None:
        await self._wakeups.wait_for(places_topic(base_model), timeout_s)

    @_transaction
    def run_log(self, model_id: str) -> RunLog:
        run = self._memory.run(model_id)
        points = self._memory.newest_points(model_id)
        return RunLog(run=run.record, pruned_seq_id=run.pruned, recovery_points=points)

    @_transaction
    def list_log(self, model_id: str, *, from_seq_id: int | None, limit: int) -> list[LoggedOperation]:
        rows = self._memory.log(model_id)
        seq_ids = sorted(seq_id for seq_id in rows if from_seq_id is None or seq_id >= from_seq_id)
        return [_logged(rows[each]) for each in (seq_ids[-limit:] if from_seq_id is None else seq_ids[:limit])]

    @_transaction
    def list_times(
        self, session_id: str, *, model_id: str | None = None, after: datetime | None = None, limit: int
    ) -> list[TimedOperation]:
        memory, wanted = self._memory, (None, model_id) if model_id is not None else None
        subjects = [
            name
            for name, run in memory.runs.items()
            if run.record.session_id == session_id and model_id in (None, name)
        ]
        subjects += [
            name
            for name, sampler in memory.samplers.items()
            if sampler.session_id == session_id and (wanted is None or sampler.model_id in wanted)
        ]
        rows = [row for name in subjects for row in memory.log(name).values()]
        if after is not None:
            rows = [row for row in rows if row.record.finished_at is None or row.record.finished_at >= after]
        return [_timed(row, early=self._is_early(row)) for row in sorted(rows, key=lambda each: each.id)[-limit:]]

    def _is_early(self, row: Operation) -> bool:
        run = self._memory.runs.get(row.record.subject_id)
        return run is not None and row.is_queued and row.record.seq_id > run.arrived

    @_transaction
    def log_totals(self, model_id: str) -> list[LogTotals]:
        kinds: defaultdict[tuple[str, OperationState], list[LoggedOperation]] = defaultdict(list)
        for row in self._memory.log(model_id).values():
            kinds[row.record.kind, row.record.state].append(_logged(row))
        return [_totals(kind, state, logged) for (kind, state), logged in sorted(kinds.items())]

    # sampling sessions

    @_transaction
    def create_sampling_session(self, sampler: SamplingSessionRecord) -> SamplingSessionRecord:
        return self._memory.samplers.setdefault(sampler.sampling_session_id, sampler)

    @_transaction
    def get_sampling_session(self, sampling_session_id: str) -> SamplingSessionRecord:
        if sampling_session_id not in self._memory.samplers:
            raise refusals.missing("sampling session", sampling_session_id)
        return self._memory.samplers[sampling_session_id]

    @_transaction
    def count_open_sampling_sessions(self, tenant: str) -> int:
        sessions = self._memory.sessions
        owners = [sessions.get(each.session_id) for each in self._memory.samplers.values()]
        return sum(each is not None and each.record.tenant == tenant and each.record.ended is None for each in owners)

    @_transaction
    def list_sampling_session_ids(self, session_id: str) -> list[str]:
        return [each.sampling_session_id for each in self._samplers_of(session_id)]

    def _samplers_of(self, session_id: str) -> list[SamplingSessionRecord]:
        found = [each for each in self._memory.samplers.values() if each.session_id == session_id]
        return sorted(found, key=lambda each: (each.created_at, each.sampling_session_id))

    # custom losses

    @_transaction
    def create_custom_loss(self, session_id: str, number: int, content: bytes) -> None:
        if self._memory.custom_losses.setdefault((session_id, number), content) != content:
            raise refusals.used_for_another_loss(session_id, number)

    @_transaction
    def get_custom_loss(self, session_id: str, number: int) -> bytes:
        if (session_id, number) not in self._memory.custom_losses:
            raise refusals.missing("custom loss", refusals.custom_loss_id(session_id, number))
        return self._memory.custom_losses[session_id, number]

    # checkpoints

    @_transaction
    def get_checkpoint(self, path: str) -> CheckpointRecord:
        return self._memory.checkpoint(path)

    @_transaction
    def list_checkpoints(
        self, tenant: str | None, *, model_id: str | None = None, limit: int | None = None, offset: int = 0
    ) -> tuple[list[CheckpointRecord], int]:
        found = [each for each in self._memory.checkpoints.values() if tenant in (None, each.tenant)]
        found = _newest_first([each for each in found if model_id in (None, each.model_id)])
        return found[offset : None if limit is None else offset + limit], len(found)

    @_transaction
    def walk_checkpoints(
        self, tenant: str | None, *, before: Position | None = None, limit: int
    ) -> list[CheckpointRecord]:
        found = [each for each in self._memory.checkpoints.values() if tenant in (None, each.tenant)]
        return _behind(before, {(each.created_at, each.path): each for each in found})[:limit]

    @_transaction
    def checkpoints_of_sessions(self, session_ids: Collection[str]) -> dict[str, KeptCheckpoints]:
        sizes: defaultdict[str, list[int]] = defaultdict(list)
        for each in self._memory.checkpoints.values():
            run = self._memory.runs.get(each.model_id)
            if run is not None and run.record.session_id in session_ids:
                sizes[run.record.session_id].append(each.size_bytes)
        return {key: KeptCheckpoints(number=len(found), num_bytes=sum(found)) for key, found in sizes.items()}

    @_transaction
    def newest_checkpoints(self, model_ids: Collection[str]) -> list[CheckpointRecord]:
        found: dict[tuple[str, CheckpointKind], CheckpointRecord] = {}
        for each in reversed(_newest_first(self._memory.checkpoints.values())):
            run = self._memory.runs.get(each.model_id)
            if each.model_id in model_ids and run is not None and run.record.tenant == each.tenant:
                found[each.model_id, each.kind] = each
        return list(found.values())

    @_transaction
    def recorded_directories(self, paths: Collection[str]) -> set[str]:
        return {each.directory for path, each in self._memory.checkpoints.items() if path in paths}

    @_transaction
    def kept_checkpoints(self, tenant: str) -> KeptCheckpoints:
        sizes = [each.size_bytes for each in self._memory.checkpoints.values() if each.tenant == tenant]
        return KeptCheckpoints(number=len(sizes), num_bytes=sum(sizes))

    @_transaction
    def add_checkpoint(self, record: CheckpointRecord) -> None:
        refuse_large_metadata(record.user_metadata)
        if record.path in self._memory.checkpoints:
            raise refusals.checkpoint_exists(record.path)
        self._put(record)

    def _note(self, record: CheckpointRecord, event: str, by: Mapping[str, str] | None = None, **details: str) -> None:
        about = {"tinker_path": record.path, "model_id": record.model_id, **details}
        self._memory.note(record.tenant, event, by, **about)

    def _put(self, record: CheckpointRecord) -> None:
        if (before := self._memory.checkpoints.get(record.path)) is None or before.directory != record.directory:
            self._note(record, "checkpoint_create")
        self._memory.deleted_checkpoints.pop(record.path, None)
        self._memory.checkpoints[record.path] = record

    @_transaction
    def update_checkpoint(
        self,
        path: str,
        change: Callable[[CheckpointRecord], CheckpointRecord],
        *,
        by: Mapping[str, str] | None = None,
    ) -> CheckpointRecord:
        found = self._memory.checkpoint(path)
        changed = replace(found, public=(new := change(found)).public, expires_at=new.expires_at)
        self._memory.checkpoints[path] = changed
        for event, details in changes_of(found, changed):
            self._note(found, event, by, **details)
        return changed

    @_transaction
    def delete_checkpoint(self, path: str) -> CheckpointRecord:
        return self._delete(path)

    @_transaction
    def delete_version(self, read: CheckpointRecord, *, by: Mapping[str, str] | None = None) -> CheckpointRecord:
        if not self._memory.checkpoint(read.path).is_version(read):
            raise refusals.version_gone(read)
        return self._delete(read.path, by)

    def _delete(self, path: str, by: Mapping[str, str] | None = None) -> CheckpointRecord:
        found = self._memory.checkpoint(path)
        self._note(found, "checkpoint_delete", by)
        del self._memory.checkpoints[path]
        self._memory.deleted_checkpoints[path] = found, datetime.now(UTC)
        return found

    def _deleted(self) -> list[CheckpointRecord]:
        return [record for record, _ in self._memory.deleted_checkpoints.values()]

    @_transaction
    def deleted_checkpoint(self, path: str) -> CheckpointRecord:
        if path not in self._memory.deleted_checkpoints:
            raise refusals.no_checkpoint(path)
        return self._memory.deleted_checkpoints[path][0]

    @_transaction
    def expired_checkpoints(self, now: datetime) -> list[CheckpointRecord]:
        return [each for each in self._memory.checkpoints.values() if each.expires_at and each.expires_at <= now]

    # the log, for servers

    @_transaction
    def submit(self, operation: NewOperation) -> str:
        return self._memory.submit(operation)

    @_transaction
    def get_operation(self, request_id: str) -> OperationRecord:
        return replace(self._memory.operation(request_id).record, payload=None)

    async def wait_for(self, request_id: str, timeout_s: float) -> OperationRecord:
        return await self._wakeups.read_until(
            lambda operation: operation.state in _FINISHED,
            partial(self.get_operation, request_id),
            topic=done_topic(request_id),
            timeout_s=timeout_s,
        )

    async def finished_samples(
        self, sampling_session_id: str, clone: int, *, after: int, limit: int, timeout_s: float
    ) -> FinishedSamples:
        return await self._wakeups.read_until(
            lambda found: len(found.samples) > 0,
            partial(self._finished_samples, sampling_session_id, clone, after, limit),
            topic=samples_topic(sampling_session_id, clone),
            timeout_s=timeout_s,
        )

    @_transaction
    def _finished_samples(self, subject_id: str, clone: int, after: int, limit: int) -> FinishedSamples:
        samples = self._memory.samples.get((subject_id, clone), Samples())
        if after > samples.last:
            raise refusals.cursor_ahead(subject_id, after, samples.last)
        found = [entry for entry in samples.entries if entry[0] > after][:limit]
        return FinishedSamples(samples=tuple(each for _, each, _ in found), cursor=found[-1][0] if found else after)

    @_transaction
    def waiting(self, request_id: str) -> Waiting:
        row = self._memory.operation(request_id)
        record, missing, place = row.record, None, None
        if record.ordered:
            run = self._memory.run(record.subject_id)
            if run.has_no_place and record.seq_id > run.arrived:
                taken, waiting = self._memory.places(record.base_model)
                place = place_wait(record.subject_id, record.tenant, waiting, taken)
            elif record.seq_id > run.arrived + 1:
                missing = run.arrived + 1 if run.unload is None else min(run.arrived + 1, run.unload)
        ready = [each for each in self._memory.ready(record.base_model) if each.record.ordered == record.ordered]
        ahead = [each for each in ready if _arrival(each) < _arrival(row)]
        running = [each for each in self._memory.unfinished.values() if each.is_running and each.id < row.id]
        running = [each for each in running if each.record.base_model == record.base_model]
        num_ahead = sum(each.record.tenant == record.tenant for each in ahead + running)
        engine = self._memory.engines.get(record.base_model)
        return Waiting(missing_seq_id=missing, num_ahead=min(num_ahead, Waiting.MANY_AHEAD), place=place, engine=engine)

    @_transaction
    def pending(self, tenant: str) -> PendingCounts:
        found = [each.record for each in self._memory.unfinished.values() if each.record.tenant == tenant]
        num_bytes = sum(len(each.payload or b"") for each in found)
        return PendingCounts(by_kind=dict(Counter(each.kind for each in found)), num_bytes=num_bytes)

    @_transaction
    def list_pending(self) -> list[PendingWork]:
        found: defaultdict[tuple[str, str, str, OperationState], list[datetime]] = defaultdict(list)
        for each in (each.record for each in self._memory.unfinished.values()):
            found[each.base_model, each.tenant, each.kind, each.state].append(each.created_at)
        return [
            PendingWork(base_model=base, tenant=who, kind=kind, state=state, number=len(times), oldest_at=min(times))
            for (base, who, kind, state), times in sorted(found.items())
        ]

    @_transaction
    def is_awaited(self, model_id: str, seq_id: int) -> bool:
        return any(each.is_queued and each.record.seq_id > seq_id for each in self._memory.pending(model_id))

    @_transaction
    def cancel(self, request_id: str) -> OperationRecord:
        row = self._memory.operation(request_id)
        if not row.record.ordered and row.record.state not in _FINISHED:
            if row.is_running:
                self._memory.untold[row.record.base_model].append(request_id)
                self._memory.told.append(work_topic(row.record.base_model))
            self._memory.finish(row, refusals.CANCELLED, OperationState.CANCELLED)
        return replace(row.record, payload=None)

    # the log, for engines

    @_transaction
    def claim(self, lease: Lease, *, training: ClaimRoom, samples: ClaimRoom) -> Claim:
        self._memory.fence(lease)
        self._wakeups.subscribed(work_topic(lease.base_model))
        ready = sorted(self._memory.ready(lease.base_model), key=_arrival)
        chosen: list[Operation] = []
        for ordered, room in ((True, training), (False, samples)):
            waiting: defaultdict[str, list[Claimable[Operation]]] = defaultdict(list)
            for row in ready:
                if row.record.ordered is ordered:
                    claimable = Claimable(key=row, num_bytes=row.record.num_bytes, arrival=row.arrival)
                    waiting[row.record.tenant].append(claimable)
            limits = room.limits(waiting)
            chosen += room.choose({tenant: waiting[tenant][:number] for tenant, number in limits.items()})
        records = [self._memory.start(row, lease) for row in chosen]
        return Claim(records=records, left_some=len(records) < len(ready))

    @_transaction
    def claim_suspect(self, lease: Lease) -> OperationRecord | None:
        self._memory.fence(lease)
        self._wakeups.subscribed(work_topic(lease.base_model))
        ready = sorted(self._memory.ready(lease.base_model), key=lambda each: each.record.seq_id)
        first = {each.record.subject_id: each for each in reversed(ready) if each.record.ordered}
        suspects = [each for each in ready if each.alone and first.get(each.record.subject_id, each) is each]
        return self._memory.start(min(suspects, key=lambda each: each.id), lease) if suspects else None

    @_transaction
    def complete(self, lease: Lease, completions: Sequence[Completion]) -> None:
        self._memory.fence(lease)
        running = [(self._memory.unfinished.get(each.request_id), each) for each in completions]
        ours = [(row, each) for row, each in running if row and row.is_running and row.engine_id == lease.engine_id]
        for row, asked in sorted(ours, key=lambda each: each[0].id):
            completion = self._unless_taken(asked)
            row.ran_at, row.run_s, row.first_token_s = completion.ran_at, completion.run_s, completion.first_token_s
            failed = isinstance(completion.result, Failed) and not completion.applied
            self._memory.finish(row, completion.result, None if failed else OperationState.SUCCEEDED)
            for effect in completion.effects:
                self._apply(effect)
            run = self._memory.runs.get(row.record.subject_id)
            if row.record.ordered and run is not None:
                run.change(
                    applied_seq_id=max(run.record.applied_seq_id, row.record.seq_id),
                    steps=max(run.record.steps, completion.steps),
                )
                if completion.measured is not None:
                    self._memory.measure(run, row.record.seq_id, completion.measured)
            self._count(row.record, completion)

    def _unless_taken(self, completion: Completion) -> Completion:
        """Return the completion, or a failure if it creates a sampling session that exists."""
        for effect in completion.effects:
            if isinstance(effect, SamplingSessionCreated):
                first = self._memory.samplers.get(wanted := effect.record.sampling_session_id)
                if first is not None:
                    error = refusals.taken(wanted, first.snapshot_id or first.base_model)
                    failed = Failed(message=str(error), category=error.category)
                    return Completion(request_id=completion.request_id, result=failed)
        return completion

    def _apply(self, effect: Effect) -> None:
        memory = self._memory
        match effect:
            case RunStateChanged():
                self._change_state(effect)
            case LoraResolved():
                memory.run(effect.model_id).change(lora=effect.lora)
            case CheckpointWritten():
                before, now = memory.checkpoints.get(effect.record.path), datetime.now(UTC)
                expired = before is not None and before.expires_at is not None and before.expires_at <= now
                public = before is not None and before.public and not expired
                self._put(replace(effect.record, public=public or effect.record.public))
            case SamplingSessionCreated():
                memory.samplers[effect.record.sampling_session_id] = effect.record
            case RecoveryPointTaken():
                memory.keep_newest(effect.record, effect.keep)
            case ExpertsSampled():
                self._keep_experts(effect)
            case RolloutsTrained():
                row = RolloutsRow(step=effect.step, seq_id=effect.seq_id, number=effect.number, content=effect.content)
                memory.keep_rollouts(memory.run(effect.model_id), row, effect.max_bytes)
            case Origin():
                memory.run(effect.model_id).origins.setdefault(effect.seq_id, effect)

    def _change_state(self, effect: RunStateChanged) -> None:
        if (run := self._memory.runs.get(effect.model_id)) is not None:
            run.change(state=effect.state, state_reason=effect.reason)
            if not run.is_live:
                self._memory.ended(run)

    def _keep_experts(self, sampled: ExpertsSampled) -> None:
        kept, now = self._memory.experts, datetime.now(UTC)
        for digest, experts in sampled.sequences.items():
            kept.pop((sampled.tenant, sampled.model_id, digest), None)
            kept[sampled.tenant, sampled.model_id, digest] = experts, now
        ours = {key: len(experts) for key, (experts, _) in kept.items() if key[0] == sampled.tenant}
        excess = sum(ours.values()) - sampled.max_bytes
        for key, size in ours.items():  # oldest first
            if excess > 0:
                del kept[key]
                excess -= size

    def _count(self, record: OperationRecord, completion: Completion) -> None:
        used, usage = completion.usage, Counter[str]()
        usage["trained_tokens"], usage["prefilled_tokens"] = used.trained_tokens, used.prefilled_tokens
        usage["sampled_tokens"], usage["engine_us"] = used.sampled_tokens, round(used.engine_s * 1e6)
        sizes = [each.record.size_bytes for each in completion.effects if isinstance(each, CheckpointWritten)]
        usage["checkpoints"], usage["stored_bytes"] = len(sizes), sum(sizes)
        if any(usage.values()):
            self._memory.usage[_hour(datetime.now(UTC)), record.tenant, record.base_model].update(usage)

    @_transaction
    def failed_pass(self, model_id: str, *, after_seq_id: int | None, before_seq_id: int) -> FailedPass | None:
        rows = [row for seq_id, row in sorted(self._memory.log(model_id).items()) if seq_id < before_seq_id]
        cleared = [row.record.seq_id for row in rows if _clears(row)]
        after = after_seq_id if after_seq_id is not None else max(cleared, default=-1)
        for row in rows:
            if row.record.seq_id > after and _is_failed_pass(row):
                assert row.record.result is not None
                failure = decode_result("failed", row.record.result)
                assert isinstance(failure, Failed)
                return FailedPass(seq_id=row.record.seq_id, request_id=row.record.request_id, failure=failure)
        return None

    @_transaction
    def cancelled(self, lease: Lease) -> list[str]:
        self._memory.fence(lease)
        return self._memory.untold.pop(lease.base_model, [])

    @_transaction
    def fail_gaps(self, base_model: str, *, older_than: datetime) -> int:
        runs = [each for each in self._memory.runs.values() if each.record.base_model == base_model]
        return sum(self._memory.fail_gap(run, older_than) for run in runs)

    async def wait_for_work(self, base_model: str, timeout_s: float) -> None:
        await self._wakeups.wait_for(work_topic(base_model), timeout_s)

    # engines and their leases

    @_transaction
    def acquire_lease(
        self, base_model: str, *, engine_id: str, duration_s: float, dead: str | None = None
    ) -> Lease | LeaseHeld:
        now = datetime.now(UTC)
        row = self._memory.leases.get(base_model) or LeaseRow(0, None, now)
        if row.engine_id not in (None, engine_id, dead) and now < row.expires_at:
            remaining_s, holder = (row.expires_at - now).total_seconds(), row.engine_id
            return LeaseHeld(base_model=base_model, engine_id=holder, remaining_s=remaining_s, until=row.expires_at)
        epoch = row.epoch if row.engine_id == engine_id else row.epoch + 1
        lease = Lease(base_model=base_model, engine_id=engine_id, epoch=epoch, duration_s=duration_s)
        self._memory.extend(lease)
        return lease

    @_transaction
    def renew_lease(self, lease: Lease) -> None:
        self._memory.fence(lease)
        self._memory.extend(lease)

    @_transaction
    def release_lease(self, base_model: str, engine_id: str) -> None:
        row = self._memory.leases.get(base_model)
        if row is not None and row.engine_id == engine_id:
            row.engine_id = None
            self._memory.told.append(lease_topic(base_model))

    async def wait_for_lease(self, base_model: str, timeout_s: float) -> None:
        await self._wakeups.next(lease_topic(base_model), timeout_s)

    @_transaction
    def report_engine(self, record: EngineRecord, *, lease: Lease | None = None) -> None:
        memory = self._memory
        if lease is not None:
            memory.fence(lease)
        elif (held := memory.leases.get(record.base_model)) and held.engine_id and datetime.now(UTC) < held.expires_at:
            return  # a supervisor reports its own engine, but another engine serves
        memory.engines[record.base_model] = record
        if record.state is not EngineState.FAILED:
            return
        for row in [each for each in memory.unfinished.values() if each.record.base_model == record.base_model]:
            run = memory.runs.get(row.record.subject_id) if row.record.ordered else None
            if run is not None and run.record.state in (RunState.READY, RunState.PARKED):
                continue  # the next engine rebuilds it, and continues
            if run is not None and run.record.state is RunState.CREATING:
                run.change(state=RunState.LOST, state_reason=record.detail)
            memory.finish(row, refusals.no_engine(record.base_model, record.detail))

    @_transaction
    def list_engines(self) -> list[EngineRecord]:
        return [record for _, record in sorted(self._memory.engines.items())]

    @_transaction
    def overdue_engines(self) -> dict[str, float]:
        now = datetime.now(UTC)
        held = [each for each in self._memory.leases.values() if each.engine_id is not None]
        return {str(each.engine_id): (now - each.expires_at).total_seconds() for each in held if each.expires_at < now}

    @_transaction
    def running_since(self) -> dict[str, datetime]:
        found: dict[str, datetime] = {}
        for each in self._memory.unfinished.values():
            if (since := each.record.started_at) is not None and each.is_running:
                found[each.record.base_model] = min(since, found.get(each.record.base_model, since))
        return found

    @_transaction
    def report_figures(self, lease: Lease, report: bytes) -> None:
        self._memory.fence(lease)
        self._memory.figures[lease.base_model] = ReportedFigures(
            base_model=lease.base_model, reported_at=datetime.now(UTC), report=report
        )

    @_transaction
    def list_figures(self) -> list[ReportedFigures]:
        return [reported for _, reported in sorted(self._memory.figures.items())]

    # recovery

    @_transaction
    def requeue(
        self,
        lease: Lease,
        *,
        max_attempts: int,
        reason: str | None,
        max_interruptions: int | None = None,
        held: frozenset[str] = frozenset(),
    ) -> list[str]:
        memory, failed = self._memory, []
        memory.fence(lease)
        for row in [each for each in memory.unfinished.values() if each.record.base_model == lease.base_model]:
            request_id = row.record.request_id
            if not row.is_running or request_id in held:  # it may have failed with its model
                continue
            row.attempts -= reason is None or max_interruptions is not None
            row.interruptions += max_interruptions is not None
            too_often = row.interruptions >= max_interruptions if max_interruptions else row.attempts >= max_attempts
            run = memory.runs.get(row.record.subject_id) if row.record.ordered else None
            if reason is not None and too_often:
                failed.append(request_id)
                failure = refusals.ended_too_often(row.record.kind, row.attempts + row.interruptions, reason)
                memory.finish(row, failure)
                if run is not None:
                    run.change(applied_seq_id=max(run.record.applied_seq_id, row.record.seq_id))
                    if row.record.kind == "create_model":
                        memory.lose(run, f"it could not be created: {failure.message}")
                continue
            if reason is not None:
                row.alone = row.record.ordered or row.attempts >= max_attempts - 1
            row.record = replace(row.record, state=OperationState.QUEUED, started_at=None)
            row.engine_id = None
            if run is not None:
                run.change(next_seq_id=min(run.record.next_seq_id, row.record.seq_id))
        memory.told.append(work_topic(lease.base_model))
        return failed

    @_transaction
    def live_models(self, base_model: str) -> list[LiveModel]:
        of_model = [each for each in self._memory.runs.values() if each.record.base_model == base_model]
        ready = [each for each in of_model if each.record.state in (RunState.READY, RunState.PARKED)]
        ready.sort(key=lambda each: (each.record.created_at, each.record.model_id))
        return [
            LiveModel(
                run=run.record,
                pruned_seq_id=run.pruned,
                rebuilds=run.rebuilds,
                recovery_points=self._memory.newest_points(run.record.model_id),
                ephemeral=tuple(
                    each.snapshot_id
                    for each in sorted(self._samplers_of(run.record.session_id), key=lambda each: each.created_at)
                    if each.model_id == run.record.model_id
                    and each.snapshot_id in (each.sampling_session_id, each.sampling_session_id + INFLIGHT)
                ),
            )
            for run in ready
        ]

    @_transaction
    def begin_rebuild(self, lease: Lease, model_id: str, *, interrupted: bool) -> int:
        self._memory.fence(lease)
        run = self._memory.run(model_id)
        if not (interrupted and run.rebuilds):
            run.rebuilds += 1
        return run.rebuilds

    @_transaction
    def end_rebuild(self, lease: Lease, model_id: str) -> None:
        self._memory.fence(lease)
        self._memory.run(model_id).rebuilds = 0

    @_transaction
    def replayable(self, model_id: str, *, after_seq_id: int, limit: int) -> list[OperationRecord]:
        rows = sorted(self._memory.log(model_id).items())
        found = [row.record for seq_id, row in rows if seq_id > after_seq_id]
        return [each for each in found if each.state is OperationState.SUCCEEDED][:limit]

    @_transaction
    def add_recovery_point(self, lease: Lease, record: RecoveryPointRecord, *, keep: int) -> None:
        self._memory.fence(lease)
        run = self._memory.runs.get(record.model_id)
        if run is None or not run.is_live:
            raise refusals.model_not_live(record)
        if record.seq_id > run.record.applied_seq_id:
            raise refusals.ahead_of_results(record, run.record.applied_seq_id)
        self._memory.keep_newest(record, keep)

    @_transaction
    def list_recovery_points(self, model_id: str) -> list[RecoveryPointRecord]:
        return list(self._memory.newest_points(model_id))

    @_transaction
    def drop_recovery_point(self, lease: Lease, model_id: str, seq_id: int) -> None:
        self._memory.fence(lease)
        self._memory.recovery_points.get(model_id, {}).pop(seq_id, None)

    @_transaction
    def lose_run(self, lease: Lease, model_id: str, reason: str) -> None:
        self._memory.fence(lease)
        if (run := self._memory.runs.get(model_id)) is not None and run.is_live:
            self._memory.lose(run, reason)

    @_transaction
    def note_run(self, lease: Lease, model_id: str, note: str) -> None:
        self._memory.fence(lease)
        if (run := self._memory.runs.get(model_id)) is not None and run.is_live:
            run.change(state_reason=note)

    # what tenants have used and keep

    @_transaction
    def hourly_usage(self, tenant: str | None, *, first: datetime, last: datetime) -> list[UsageRecord]:
        found = sorted(self._memory.usage.items())
        found = [(key, used) for key, used in found if _hour(first) <= key[0] <= last and tenant in (None, key[1])]
        return [_used(of, base_model, hour, used) for (hour, of, base_model), used in found]

    @_transaction
    def total_usage(self, tenant: str | None) -> list[UsageRecord]:
        totals: defaultdict[tuple[str, str], Counter[str]] = defaultdict(Counter)
        for (_, of, base_model), used in self._memory.usage.items():
            totals[of, base_model].update(used)
        return [_used(*key, None, used) for key, used in sorted(totals.items()) if tenant in (None, key[0])]

    @_transaction
    def stored_checkpoints(self, tenant: str | None, *, project_id: str | None = None) -> list[StoredCheckpoints]:
        sizes: defaultdict[tuple[str, str | None], list[int]] = defaultdict(list)
        for each in self._memory.checkpoints.values():
            run = self._memory.runs.get(each.model_id)
            session = None if run is None else self._memory.sessions.get(run.record.session_id)
            project = None if session is None else session.record.project_id
            if tenant in (None, each.tenant) and project_id in (None, project):
                sizes[each.tenant, project].append(each.size_bytes)
        return [
            StoredCheckpoints(tenant=of, project_id=project, number=len(found), num_bytes=sum(found))
            for (of, project), found in sorted(sizes.items(), key=lambda item: (item[0][0], item[0][1] or ""))
        ]

    @_transaction
    def kept_bytes(self, tenant: str | None) -> list[KeptBytes]:
        memory = self._memory
        kept: defaultdict[str, Counter[str]] = defaultdict(Counter)
        for row in memory.operations.values():
            kept[row.record.tenant]["log"] += row.size
        for checkpoint in memory.checkpoints.values():
            kept[checkpoint.tenant]["checkpoints"] += checkpoint.size_bytes
        for sampler in memory.samplers.values():
            session = memory.sessions.get(sampler.session_id)
            if session is not None and session.record.ended is None and sampler.num_bytes:
                kept[session.record.tenant]["snapshots"] += sampler.num_bytes
        for points in memory.recovery_points.values():
            for point in points.values():
                kept[memory.run(point.model_id).record.tenant]["recovery_points"] += point.size_bytes
        for (of, _, _), (experts, _) in memory.experts.items():
            kept[of]["routed_experts"] += len(experts)
        for run in memory.runs.values():
            if num_bytes := run.record.metric_bytes + run.record.rollout_bytes:
                kept[run.record.tenant]["metrics"] += num_bytes
        return [KeptBytes(tenant=of, **found) for of, found in sorted(kept.items()) if tenant in (None, of)]

    @_transaction
    def find_routed_experts(self, tenant: str, model_id: str, digests: Sequence[bytes]) -> dict[bytes, bytes]:
        kept = self._memory.experts
        keys = {digest: (tenant, model_id, digest) for digest in digests}
        return {digest: kept[key][0] for digest, key in keys.items() if key in kept}

    # curves

    @_transaction
    def log_metrics(self, model_id: str, points: Sequence[Measured]) -> int:
        run, changed = self._memory.run(model_id), dict[int, Measured]()
        for point in points:
            known = changed.get(point.step) or run.metrics.get((point.step, OF_CLIENT))
            values = merged(known.values if known is not None else {}, point)
            if known is None or values != known.values:
                changed[point.step] = replace(point, values=values)
        for point in changed.values():
            self._memory.measure(run, OF_CLIENT, point)
        return run.record.metric_bytes

    @_transaction
    def read_metrics(
        self, model_id: str, *, from_step: int = 0, after: int | None = None, limit: int
    ) -> list[MetricsRow]:
        run, first = self._memory.runs.get(model_id), (from_step, OF_CLIENT - 1 if after is None else after)
        rows = sorted(run.metrics.items()) if run is not None else []
        return [row for key, row in rows if key > first][:limit]

    async def wait_for_metrics(self, model_id: str, *, known: int, timeout_s: float) -> int:
        return await self._wakeups.read_until(
            lambda found: found > known,
            partial(self._metric_bytes, model_id),
            topic=metrics_topic(model_id),
            timeout_s=timeout_s,
        )

    @_transaction
    def _metric_bytes(self, model_id: str) -> int:
        return self._memory.run(model_id).record.metric_bytes

    # links to runs

    @_transaction
    def add_share_link(self, link: ShareLink, *, by: Mapping[str, str] | None = None) -> None:
        run = self._memory.run(link.model_id)
        run.share_links[link.share_id] = link
        about = {"model_id": link.model_id, "share_id": link.share_id}
        self._memory.note(run.record.tenant, "share_link_create", by, **about)

    @_transaction
    def find_share_link(self, digest: str) -> ShareLink | None:
        links = (link for run in self._memory.runs.values() for link in run.share_links.values())
        return next((link for link in links if link.digest == digest), None)

    @_transaction
    def list_share_links(self, model_id: str) -> list[ShareLink]:
        run = self._memory.runs.get(model_id)
        links = run.share_links.values() if run is not None else []
        return sorted(links, key=lambda link: (link.created_at, link.share_id))

    @_transaction
    def delete_share_link(self, model_id: str, share_id: str, *, by: Mapping[str, str] | None = None) -> bool:
        run = self._memory.runs.get(model_id)
        if run is None or run.share_links.pop(share_id, None) is None:
            return False
        self._memory.note(run.record.tenant, "share_link_delete", by, model_id=model_id, share_id=share_id)
        return True

    # API keys made over HTTP

    @_transaction
    def add_api_key(self, key: IssuedKey, *, by: Mapping[str, str] | None = None) -> None:
        self._memory.api_keys[key.key_id] = key
        self._memory.note(key.tenant, "key_create", by, made_key_id=key.key_id, name=key.name)

    @_transaction
    def find_api_key(self, key_id: str) -> IssuedKey | None:
        return self._memory.api_keys.get(key_id)

    @_transaction
    def list_api_keys(self, tenant: str | None, *, limit: int, offset: int) -> list[IssuedKey]:
        found = [each for each in self._memory.api_keys.values() if tenant in (None, each.tenant)]
        found.sort(key=lambda each: (each.created_at, each.key_id), reverse=True)
        return found[offset : offset + limit]

    @_transaction
    def count_api_keys(self, tenant: str) -> int:
        return sum(each.tenant == tenant for each in self._memory.api_keys.values())

    @_transaction
    def delete_api_key(self, key_id: str, *, tenant: str | None, by: Mapping[str, str] | None = None) -> bool:
        known = self._memory.api_keys.get(key_id)
        if known is None or tenant not in (None, known.tenant):
            return False
        del self._memory.api_keys[key_id]
        self._memory.note(known.tenant, "key_delete", by, deleted_key_id=key_id, name=known.name)
        return True

    # the audit log

    @_transaction
    def add_audit_entry(self, entry: AuditEntry) -> None:
        self._memory.audit.append(entry)

    @_transaction
    def read_audit(
        self,
        tenant: str | None,
        *,
        since: datetime,
        until: datetime,
        resource: str | None = None,
        limit: int,
        offset: int = 0,
    ) -> list[AuditEntry]:
        found = [
            each
            for each in self._memory.audit
            if since <= each.at < until
            and tenant in (None, each.tenant)
            and (resource is None or each.event.startswith(f"{resource}_"))
        ]
        return sorted(found, key=lambda each: each.at)[offset : offset + limit]

    @_transaction
    def prune_audit(self, before: datetime) -> int:
        audit = self._memory.audit
        self._memory.audit = [each for each in audit if each.at >= before]
        return len(audit) - len(self._memory.audit)

    # lineage

    @_transaction
    def origins_of(self, model_ids: Collection[str]) -> list[Origin]:
        return [each for each in self._origins() if each.model_id in model_ids]

    @_transaction
    def derived_from(self, model_ids: Collection[str]) -> list[Origin]:
        return [each for each in self._origins() if each.source_id in model_ids]

    def _origins(self) -> list[Origin]:
        found = [each for run in self._memory.runs.values() for each in run.origins.values()]
        return sorted(found, key=lambda each: (each.created_at, each.model_id, each.seq_id))

    # rollouts

    @_transaction
    def log_rewards(self, model_id: str, step: int, rewards: Mapping[bytes, float], max_bytes: int) -> None:
        run = self._memory.run(model_id)
        before = run.rollouts.get((step, OF_CLIENT))
        content = with_rewards(None if before is None else before.content, step, rewards)
        row = RolloutsRow(step=step, seq_id=OF_CLIENT, number=0, content=content)
        self._memory.keep_rollouts(run, row, max_bytes)

    @_transaction
    def rollout_steps(self, model_id: str) -> list[int]:
        run = self._memory.runs.get(model_id)
        return sorted({step for step, seq_id in (run.rollouts if run is not None else ()) if seq_id != OF_CLIENT})

    @_transaction
    def read_rollouts(self, model_id: str, step: int) -> list[RolloutsRow]:
        run = self._memory.runs.get(model_id)
        return [row for key, row in sorted(run.rollouts.items()) if key[0] == step] if run is not None else []

    # tokens that are being drawn

    @_transaction
    def tell_drawn(self, pieces: Sequence[DrawnTokens]) -> None:
        self._memory.told += [
            message(drawn_topic(each.sampling_session_id, each.seq_id), each.encoded()) for each in pieces
        ]

    def drawn(
        self, sampling_session_id: str, seq_id: int, hear: Callable[[DrawnTokens], None]
    ) -> AbstractContextManager[None]:
        decoded = partial(DrawnTokens.decoded, sampling_session_id, seq_id)
        return self._wakeups.listen(drawn_topic(sampling_session_id, seq_id), lambda text: hear(decoded(text)))

    # upkeep

    @_transaction
    def secret(self, name: str) -> bytes:
        return self._memory.secrets.setdefault(name, secrets.token_bytes(32))

    async def expect_writes(self) -> None:
        """Memory can always be written."""

    @_transaction
    def prune(self, finished_before: datetime, *, idle_since: datetime | None = None) -> int:
        memory = self._memory
        times = [(row, row.record.finished_at) for row in memory.operations.values()]
        old = [row for row, finished_at in times if finished_at is not None and finished_at < finished_before]
        gone = [row for row in old if self._is_unneeded(row, idle_since or finished_before, finished_before)]
        for row in gone:
            subject_id, seq_id = row.record.subject_id, row.record.seq_id
            del memory.operations[row.record.request_id]
            rows = memory.of_subject[subject_id]
            del rows[seq_id]
            if not rows:
                del memory.of_subject[subject_id]
            if row.record.ordered and (run := memory.runs.get(subject_id)) is not None:
                run.pruned = max(run.pruned, seq_id)
        memory.pruned_before = max(finished_before, memory.pruned_before or finished_before)
        for samples in memory.samples.values():
            kept = finished_before - _SAMPLES_KEPT_LONGER
            samples.entries = [entry for entry in samples.entries if entry[2] >= kept]
        deleted = memory.deleted_checkpoints.items()
        memory.deleted_checkpoints = {path: each for path, each in deleted if each[1] >= finished_before}
        memory.experts = {key: each for key, each in memory.experts.items() if each[1] >= finished_before}
        keys = memory.api_keys.items()
        memory.api_keys = {
            key_id: each for key_id, each in keys if each.expires_at is None or each.expires_at >= finished_before
        }
        return len(gone)

    def _is_unneeded(self, row: Operation, idle_since: datetime, finished_before: datetime) -> bool:
        """Return whether no recovery and no step needs an operation any more, and nobody looks at its model's log."""
        run = self._memory.runs.get(row.record.subject_id)
        if not row.record.ordered or run is None:
            return True
        if idle_since < finished_before and run.record.last_request_at >= idle_since:
            return False
        if not run.is_live:
            return True
        seq_id, points = row.record.seq_id, self._memory.recovery_points.get(row.record.subject_id, {})
        rows = self._memory.log(row.record.subject_id).values()
        done_with = not _is_failed_pass(row) or any(each.record.seq_id > seq_id and _clears(each) for each in rows)
        return seq_id < run.record.next_seq_id and seq_id <= min(points, default=-1) and done_with


def _arrival(row: Operation) -> tuple[int, int]:
    return row.arrival, row.record.seq_id


def _clears(row: Operation) -> bool:
    """Return whether an operation has cleared the pending gradient."""
    return row.record.kind in CLEARING and row.record.state is OperationState.SUCCEEDED


def _is_failed_pass(row: Operation) -> bool:
    """Return whether it is a pass that failed, or failed behind a gap, which may have been a pass."""
    return row.record.state is OperationState.FAILED and (row.record.kind == PASS or row.behind_a_gap)


def _behind(before: Position | None, found: Mapping[Position, T]) -> list[T]:
    """Return the values behind a position, newest first."""
    return [found[at] for at in sorted(found, reverse=True) if before is None or at < before]


def _newest_first(records: Collection[CheckpointRecord]) -> list[CheckpointRecord]:
    return sorted(records, key=lambda each: (each.created_at, each.path), reverse=True)


def _hour(time: datetime) -> datetime:
    return time.replace(minute=0, second=0, microsecond=0)


def _used(tenant: str, base_model: str, hour: datetime | None, used: Counter[str]) -> UsageRecord:
    counts = dict(used)
    engine_s = counts.pop("engine_us", 0) / 1e6
    return UsageRecord(tenant=tenant, base_model=base_model, hour=hour, engine_s=engine_s, **counts)


def _logged(row: Operation) -> LoggedOperation:
    record = row.record
    return LoggedOperation(
        seq_id=record.seq_id,
        request_id=record.request_id,
        kind=record.kind,
        state=record.state,
        num_tokens=record.num_tokens,
        created_at=record.created_at,
        started_at=record.started_at,
        finished_at=record.finished_at,
        attempts=row.attempts,
        interruptions=row.interruptions,
        payload_bytes=len(record.payload or b""),
        result_bytes=len(record.result or b""),
        result_kind=record.result_kind,
        result=record.result,
    )


def _timed(row: Operation, *, early: bool) -> TimedOperation:
    record = row.record
    return TimedOperation(
        request_id=record.request_id,
        subject_id=record.subject_id,
        seq_id=record.seq_id,
        ordered=record.ordered,
        kind=record.kind,
        state=record.state,
        early=early,
        num_tokens=record.num_tokens,
        created_at=record.created_at,
        started_at=record.started_at,
        ran_at=row.ran_at,
        run_s=row.run_s,
        first_token_s=row.first_token_s,
        finished_at=record.finished_at,
    )


def _totals(kind: str, state: OperationState, logged: Sequence[LoggedOperation]) -> LogTotals:
    started = [(each, each.started_at) for each in logged]
    finished = [(at, each.finished_at) for each, at in started]
    return LogTotals(
        kind=kind,
        state=state,
        number=len(logged),
        num_tokens=sum(each.num_tokens for each in logged),
        payload_bytes=sum(each.payload_bytes for each in logged),
        result_bytes=sum(each.result_bytes for each in logged),
        queued_s=sum((at - each.created_at).total_seconds() for each, at in started if at is not None),
        run_s=sum((end - at).total_seconds() for at, end in finished if at is not None and end is not None),
        retried=sum(each.attempts > 1 or each.interruptions > 0 for each in logged),
    )
