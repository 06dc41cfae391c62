"""SqlStore: the request store over SQLAlchemy. Writes go through the group commit, reads through a small pool."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection, Sequence
from contextlib import ExitStack, suppress
from datetime import datetime
from functools import partial

from sqlalchemy.exc import SQLAlchemyError

from tinsmith.errors import StoreError
from tinsmith.failpoints import durable_boundary
from tinsmith.sql_store.choose import dialect_of
from tinsmith.sql_store.config import SqlStoreConfig
from tinsmith.sql_store.databases.database import Database
from tinsmith.sql_store.migrate import migrate
from tinsmith.sql_store.reader import Reader
from tinsmith.sql_store.transactions import (
    checkpoint_rows,
    claiming,
    closing,
    completing,
    finished_samples,
    leases,
    log,
    log_reading,
    models,
    pruning,
    recovering,
    secret_rows,
    sessions,
    submitting,
)
from tinsmith.sql_store.transactions.writer import Writer
from tinsmith.store import (
    CheckpointRecord,
    Completion,
    EngineRecord,
    EngineState,
    FinishedSamples,
    Lease,
    LeaseHeld,
    LiveModel,
    LoggedOperation,
    LogTotals,
    NewOperation,
    OperationRecord,
    RecoveryPointRecord,
    RequestStore,
    RunLog,
    RunRecord,
    SamplingSessionRecord,
    SessionEnd,
    SessionRecord,
    StoreContext,
    Waiting,
)

_PRUNE_AT_A_TIME = 500

_log = logging.getLogger(__name__)


class SqlStore(RequestStore):
    """Creating it does no I/O and raises ConfigError for a URL that cannot be used.

    Durable: what a client or another operation builds on. Relaxed: what a restart of the machine may undo, since it
    undoes what it is about as well (claims of an engine, its state, heartbeats).
    """

    def __init__(self, config: SqlStoreConfig, context: StoreContext) -> None:
        self._dialect = dialect_of(config, context)
        self._max_readers = config.max_readers
        self._safety_poll_s = config.safety_poll_s
        self._wakeups = self._dialect.wakeups()
        self._work: dict[str, asyncio.Event] = {}
        self._subscriptions = ExitStack()
        self._sweeper: asyncio.Task[None] | None = None

    async def open(self) -> None:
        durable = await self._migrated()
        self._durable = Writer(durable, self._wakeups)
        self._relaxed = Writer(self._dialect.writer(durable=False), self._wakeups)
        self._reader = Reader([self._dialect.reader() for _ in range(self._max_readers)])
        await self._wakeups.open()
        for part in (self._durable, self._relaxed, self._reader):
            part.open()
        self._sweeper = asyncio.create_task(self._sweep(), name="sql-safety-poll")

    async def _migrated(self) -> Database:
        """Return the connection for durable writes, to a database of the newest schema."""
        durable = self._dialect.writer(durable=True)
        try:
            await durable.migrate(partial(migrate, name=self._dialect.name))
        except (SQLAlchemyError, OSError) as error:
            await durable.close()
            msg = f"cannot open the database {self._dialect.name!r}: {error}"
            raise StoreError(msg) from error
        except BaseException:
            await durable.close()
            raise
        return durable

    async def close(self) -> None:
        if self._sweeper is None:
            return
        self._sweeper.cancel()
        with suppress(asyncio.CancelledError):
            await self._sweeper
        self._sweeper = None
        self._subscriptions.close()
        self._work.clear()
        await self._durable.close()
        await self._relaxed.close()
        await self._reader.close()
        await self._wakeups.close()

    # sessions

    @durable_boundary("store.create_session")
    async def create_session(self, session: SessionRecord, *, idempotency_key: str | None) -> SessionRecord:
        return await self._durable.write(lambda tx: sessions.create(tx, session, idempotency_key))

    async def get_session(self, session_id: str) -> SessionRecord:
        return await self._reader.read(lambda db: sessions.get(db, session_id))

    async def list_sessions(self, tenant: str | None, *, limit: int, offset: int) -> list[SessionRecord]:
        return await self._reader.read(lambda db: sessions.list_all(db, tenant, limit, offset))

    async def touch_session(self, session_id: str, at: datetime) -> SessionRecord:
        return await self._relaxed.write(lambda tx: sessions.touch(tx, session_id, at))

    async def update_session(self, session_id: str, *, project_id: str | None) -> SessionRecord:
        return await self._durable.write(lambda tx: sessions.update(tx, session_id, project_id))

    @durable_boundary("store.end_session")
    async def end_session(self, session_id: str, reason: SessionEnd, detail: str | None) -> SessionRecord:
        return await self._durable.write(lambda tx: sessions.end(tx, session_id, reason, detail))

    async def expire_sessions(self, last_seen_before: datetime) -> list[str]:
        return await self._durable.write(lambda tx: sessions.expire(tx, last_seen_before))

    # models, samplers, checkpoints

    @durable_boundary("store.create_run")
    async def create_run(self, run: RunRecord, operation: NewOperation) -> str:
        return await self._durable.write(
            lambda tx: models.create_run(tx, run, operation), models=lambda _: (run.model_id,)
        )

    async def get_run(self, model_id: str) -> RunRecord:
        return await self._reader.read(lambda db: models.get_run(db, model_id))

    async def list_runs(
        self, tenant: str | None, *, session_id: str | None = None, limit: int, offset: int
    ) -> tuple[list[RunRecord], int]:
        return await self._reader.read(lambda db: models.list_runs(db, tenant, session_id, limit, offset))

    @durable_boundary("store.create_sampling_session")
    async def create_sampling_session(self, sampler: SamplingSessionRecord) -> SamplingSessionRecord:
        return await self._durable.write(lambda tx: models.create_sampling_session(tx, sampler))

    async def get_sampling_session(self, sampling_session_id: str) -> SamplingSessionRecord:
        return await self._reader.read(lambda db: models.get_sampling_session(db, sampling_session_id))

    async def list_sampling_sessions(self, session_id: str) -> list[SamplingSessionRecord]:
        return await self._reader.read(lambda db: models.list_sampling_sessions(db, session_id))

    async def get_checkpoint(self, path: str) -> CheckpointRecord:
        return await self._reader.read(lambda db: checkpoint_rows.get(db, path))

    async def list_checkpoints(
        self, tenant: str | None, *, model_id: str | None = None, limit: int | None = None, offset: int = 0
    ) -> tuple[list[CheckpointRecord], int]:
        return await self._reader.read(lambda db: checkpoint_rows.list_all(db, tenant, model_id, limit, offset))

    async def update_checkpoint(
        self, path: str, change: Callable[[CheckpointRecord], CheckpointRecord]
    ) -> CheckpointRecord:
        return await self._durable.write(lambda tx: checkpoint_rows.update(tx, path, change))

    @durable_boundary("store.delete_checkpoint")
    async def delete_checkpoint(self, path: str) -> CheckpointRecord:
        return await self._durable.write(lambda tx: checkpoint_rows.delete(tx, path))

    async def deleted_checkpoint(self, path: str) -> CheckpointRecord:
        return await self._reader.read(lambda db: checkpoint_rows.deleted(db, path))

    async def expired_checkpoints(self, now: datetime) -> list[CheckpointRecord]:
        return await self._reader.read(lambda db: checkpoint_rows.expired(db, now))

    async def add_checkpoint(self, record: CheckpointRecord) -> None:
        await self._durable.write(lambda tx: checkpoint_rows.add(tx, record))

    # a model's log, for people

    async def run_log(self, model_id: str) -> RunLog:
        return await self._reader.read(lambda db: log_reading.run_log(db, model_id))

    async def list_log(self, model_id: str, *, from_seq_id: int | None, limit: int) -> list[LoggedOperation]:
        return await self._reader.read(lambda db: log_reading.list_log(db, model_id, from_seq_id, limit))

    async def log_totals(self, model_id: str) -> list[LogTotals]:
        return await self._reader.read(lambda db: log_reading.totals(db, model_id))

    # the log, server side

    @durable_boundary("store.submit")
    async def submit(self, operation: NewOperation) -> str:
        models = (operation.subject_id,) if operation.ordered else ()
        return await self._durable.write(lambda tx: submitting.submit(tx, operation), models=lambda _: models)

    async def get_operation(self, request_id: str) -> OperationRecord:
        return await self._reader.read(lambda db: log.get(db, request_id))

    async def wait_for(self, request_id: str, timeout_s: float) -> OperationRecord:
        with self._wakeups.subscribe(log.done_topic(request_id)) as told, suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while (record := await self.get_operation(request_id)).state not in log.FINISHED:
                    await told.wait()
                    told.clear()
                return record
        return await self.get_operation(request_id)

    async def finished_samples(
        self, sampling_session_id: str, clone: int, *, after: int, limit: int, timeout_s: float
    ) -> FinishedSamples:
        def read() -> Awaitable[FinishedSamples]:
            return self._reader.read(
                lambda db: finished_samples.after(db, sampling_session_id, clone, cursor=after, limit=limit)
            )

        if timeout_s > 0:
            topic = finished_samples.topic(sampling_session_id, clone)
            with self._wakeups.subscribe(topic) as told, suppress(TimeoutError):
                async with asyncio.timeout(timeout_s):
                    while not (found := await read()).samples:
                        await told.wait()
                        told.clear()
                    return found
        return await read()

    async def waiting(self, request_id: str) -> Waiting:
        return await self._reader.read(lambda db: log.waiting(db, request_id))

    async def count_samples(self, tenant: str) -> int:
        return await self._reader.read(lambda db: log.count_samples(db, tenant))

    async def cancel(self, request_id: str) -> OperationRecord:
        return await self._durable.write(lambda tx: claiming.cancel(tx, request_id))

    # leases

    @durable_boundary("store.acquire_lease")
    async def acquire_lease(
        self, base_model: str, *, engine_id: str, duration_s: float, dead: str | None = None
    ) -> Lease | LeaseHeld:
        return await self._durable.write(lambda tx: leases.acquire(tx, base_model, engine_id, duration_s, dead))

    async def renew_lease(self, lease: Lease) -> None:
        await self._relaxed.write(lambda tx: leases.renew(tx, lease))

    async def release_lease(self, base_model: str, engine_id: str) -> None:
        await self._durable.write(lambda tx: leases.release(tx, base_model, engine_id))

    async def wait_for_lease(self, base_model: str, timeout_s: float) -> None:
        with self._wakeups.subscribe(leases.topic(base_model)) as told, suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await told.wait()

    # the log, engine side

    @durable_boundary("store.claim")
    async def claim(
        self,
        lease: Lease,
        *,
        max_operations: int,
        ordered: bool | None = None,
        alone: bool = False,
    ) -> list[OperationRecord]:
        base_model = lease.base_model
        self._work_event(base_model)
        if max_operations <= 0 or not await self._reader.read(
            lambda db: claiming.something_queued(db, base_model, ordered=ordered)
        ):
            return []
        return await self._relaxed.write(
            lambda tx: claiming.claim(tx, lease, max_operations=max_operations, ordered=ordered, alone=alone),
            models=None if ordered is False else lambda db: claiming.models_to_claim(db, base_model),
        )

    @durable_boundary("store.complete")
    async def complete(self, lease: Lease, completions: Sequence[Completion]) -> None:
        if completions:
            await self._durable.write(
                lambda tx: completing.complete(tx, lease, completions),
                models=lambda db: completing.models_of(db, completions),
            )

    async def cancelled(self, lease: Lease) -> list[str]:
        if not await self._reader.read(lambda db: claiming.untold_cancellations(db, lease.base_model)):
            return []
        return await self._relaxed.write(lambda tx: claiming.cancelled(tx, lease))

    async def fail_gaps(self, base_model: str, *, older_than: datetime) -> int:
        if not await self._reader.read(lambda db: closing.waiting_since(db, base_model, older_than)):
            return 0
        return await self._durable.write(lambda tx: closing.fail_gaps(tx, base_model, older_than))

    async def wait_for_work(self, base_model: str, timeout_s: float) -> None:
        event = self._work_event(base_model)
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):  # before 3.12 wait_for may swallow a cancellation
                await event.wait()
        event.clear()

    def _work_event(self, base_model: str) -> asyncio.Event:
        """Subscribe for good, so that nothing is missed between a look at the queue and the next wait."""
        if base_model not in self._work:
            topic = self._wakeups.subscribe(log.work_topic(base_model))
            self._work[base_model] = self._subscriptions.enter_context(topic)
            self._work[base_model].set()
        return self._work[base_model]

    # recovery, engine side

    @durable_boundary("store.requeue")
    async def requeue(
        self,
        lease: Lease,
        *,
        max_attempts: int,
        reason: str | None,
        max_interruptions: int | None = None,
        held: Collection[str] = (),
    ) -> list[str]:
        return await self._durable.write(
            lambda tx: recovering.requeue(tx, lease, max_attempts, reason, max_interruptions, frozenset(held))
        )

    async def live_models(self, base_model: str) -> list[LiveModel]:
        return await self._reader.read(lambda db: recovering.live_models(db, base_model))

    async def begin_rebuild(self, lease: Lease, model_id: str, *, interrupted: bool) -> int:
        return await self._relaxed.write(
            lambda tx: recovering.begin_rebuild(tx, lease, model_id, interrupted=interrupted)
        )

    async def end_rebuild(self, lease: Lease, model_id: str) -> None:
        await self._relaxed.write(lambda tx: recovering.end_rebuild(tx, lease, model_id))

    async def replayable(self, model_id: str, *, after_seq_id: int, limit: int) -> list[OperationRecord]:
        return await self._reader.read(lambda db: recovering.replayable(db, model_id, after_seq_id, limit))

    @durable_boundary("store.add_recovery_point")
    async def add_recovery_point(self, lease: Lease, record: RecoveryPointRecord, *, keep: int) -> None:
        await self._durable.write(lambda tx: recovering.add_recovery_point(tx, lease, record, keep))

    async def list_recovery_points(self, model_id: str) -> list[RecoveryPointRecord]:
        return await self._reader.read(lambda db: recovering.list_recovery_points(db, model_id))

    async def drop_recovery_point(self, lease: Lease, model_id: str, seq_id: int) -> None:
        await self._durable.write(lambda tx: recovering.drop_recovery_point(tx, lease, model_id, seq_id))

    async def lose_run(self, lease: Lease, model_id: str, reason: str) -> None:
        await self._durable.write(lambda tx: recovering.lose_run(tx, lease, model_id, reason))

    async def note_run(self, lease: Lease, model_id: str, note: str) -> None:
        await self._durable.write(lambda tx: recovering.note_run(tx, lease, model_id, note))

    # engines

    @durable_boundary("store.report_engine")
    async def report_engine(self, record: EngineRecord, *, lease: Lease | None = None) -> None:
        writer = self._durable if record.state == EngineState.FAILED else self._relaxed
        await writer.write(lambda tx: closing.report_engine(tx, record, lease))

    async def list_engines(self) -> list[EngineRecord]:
        return await self._reader.read(closing.list_engines)

    # secrets

    async def secret(self, name: str) -> bytes:
        found = await self._reader.read(lambda db: secret_rows.find(db, name))
        if found is not None:
            return found
        return await self._durable.write(lambda tx: secret_rows.find_or_make(tx.session, name))

    # housekeeping

    @durable_boundary("store.prune")
    async def prune(self, finished_before: datetime, *, idle_since: datetime | None = None) -> int:
        pruned = 0
        while part := await self._durable.write(
            lambda tx: pruning.prune(tx, finished_before, idle_since or finished_before, _PRUNE_AT_A_TIME)
        ):
            pruned += part
        await self._durable.write(lambda tx: finished_samples.prune(tx.session, finished_before))
        forgotten = await self._durable.write(lambda tx: checkpoint_rows.forget_deleted(tx, finished_before))
        await self._durable.scrub(deleted=pruned + forgotten > 0)
        return pruned

    async def _sweep(self) -> None:
        """Wake now and then whoever could have missed a wake-up."""
        while True:
            await asyncio.sleep(self._safety_poll_s)
            topics = self._wakeups.topics()
            waited_for = [request_id for topic in topics if (request_id := log.request_of(topic)) is not None]
            try:
                done = await self._reader.read(partial(log.finished, request_ids=waited_for)) if waited_for else []
            except StoreError:
                _log.exception("the database could not be read; trying again in %s s", self._safety_poll_s)
                continue
            self._wakeups.wake(log.done_topic(request_id) for request_id in done)
            self._wakeups.wake(topic for topic in topics if log.request_of(topic) is None)
