"""SqlStore: the request store over SQLAlchemy. Writes go through the group commit, reads through a few connections.

`SqlStore` maps each method of the store to a function of a subject, and to the connection that runs it.
"""

import asyncio
from collections.abc import Callable, Coroutine, Iterable
from contextlib import AbstractContextManager, suppress
from datetime import datetime
from typing import Any, Concatenate, ParamSpec, TypeVar

from sqlalchemy import Connection

from tinsmith.failpoints import durable_boundary
from tinsmith.sql_store.config import SqlStoreConfig
from tinsmith.sql_store.group_commit import Call
from tinsmith.sql_store.subjects import (
    checkpoints,
    claiming,
    completing,
    engine_states,
    gaps,
    leases,
    log,
    log_inspection,
    metrics,
    models,
    recovery,
    requests,
    retention,
    routed_experts,
    runs,
    sampling_sessions,
    sessions,
    submitting,
    token_streams,
    transaction,
    upkeep,
    usage,
)
from tinsmith.sql_store.subjects.transaction import Connections, Transaction
from tinsmith.store import DrawnTokens, RequestStore, SessionRecord, StoreContext

P = ParamSpec("P")
T = TypeVar("T")

Async = Coroutine[Any, Any, T]
Locks = Callable[Concatenate[Connection, P], Iterable[str]]


def _read(function: Callable[Concatenate[Connection, P], T]) -> Callable[Concatenate["SqlStore", P], Async[T]]:
    """Make the method that runs a function in a transaction that only reads."""

    async def method(store: "SqlStore", /, *args: P.args, **options: P.kwargs) -> T:
        result: T = await store.connections.reader.ask(Call(function, args, options))
        return result

    return method


def _durable(
    function: Callable[Concatenate[Transaction, P], T], *, locks: Locks[P] | None = None, point: str | None = None
) -> Callable[Concatenate["SqlStore", P], Async[T]]:
    """Make the method that runs a function in a durable transaction, after locking the models that `locks` returns."""

    async def method(store: "SqlStore", /, *args: P.args, **options: P.kwargs) -> T:
        result: T = await store.connections.durable.ask(Call(function, args, options, locks))
        return result

    return method if point is None else durable_boundary(point)(method)


def _relaxed(
    function: Callable[Concatenate[Transaction, P], T],
) -> Callable[Concatenate["SqlStore", P], Async[T]]:
    """Make the method that runs a function in a transaction that a power cut may undo."""

    async def method(store: "SqlStore", /, *args: P.args, **options: P.kwargs) -> T:
        result: T = await store.connections.relaxed.ask(Call(function, args, options))
        return result

    return method


def _over(
    function: Callable[Concatenate[Connections, P], Async[T]],
) -> Callable[Concatenate["SqlStore", P], Async[T]]:
    """Make the method that does what takes more than one transaction."""

    def method(store: "SqlStore", /, *args: P.args, **options: P.kwargs) -> Async[T]:
        return function(store.connections, *args, **options)

    return method


class SqlStore(RequestStore):
    """Creating it does no I/O. It raises ConfigError for a URL that cannot be used."""

    def __init__(self, config: SqlStoreConfig, context: StoreContext) -> None:
        self._config = config
        self.connections = Connections(config, context, Transaction)
        self._sweeper: asyncio.Task[None] | None = None

    @property
    def max_value_bytes(self) -> int:
        return self._config.max_value_bytes

    async def open(self) -> None:
        await self.connections.open()
        self._heartbeats = sessions.Heartbeats(self.connections.relaxed)
        self._heartbeats.open()
        sweep = log.sweep(self.connections, self._config.safety_poll_s)
        self._sweeper = asyncio.create_task(sweep, name="sql-safety-poll")

    async def close(self) -> None:
        if self._sweeper is None:
            return
        self._sweeper.cancel()
        with suppress(asyncio.CancelledError):
            await self._sweeper
        self._sweeper = None
        await self._heartbeats.close()
        await self.connections.close()

    # sessions
    create_session = _over(sessions.create_session)
    get_session = _read(sessions.get)
    find_sessions = _read(sessions.find)
    list_sessions = _read(sessions.list_all)
    count_live_sessions = _read(sessions.count_live)
    update_session = _durable(sessions.update)
    end_session = _over(sessions.end_session)
    unload_run = _over(sessions.unload_run)
    expire_sessions = _over(sessions.expire_sessions)
    forget_sessions = _over(retention.forget_sessions)

    async def hear_session(self, session_id: str, at: datetime, *, server_id: str | None = None) -> SessionRecord:
        return await self._heartbeats.record(sessions.Heartbeat(session_id, at, server_id))

    # models
    create_run = _over(runs.create_run)
    count_live_models = _read(runs.count_live)
    get_run = _read(runs.get)
    list_runs = _read(runs.list_all)
    admit_models = _over(runs.admit_models)
    park_model = _durable(runs.park, locks=runs.model_to_park, point="store.park_model")
    return_model = _durable(runs.bring_back, locks=runs.model_to_bring_back, point="store.return_model")
    wait_for_places = _over(runs.wait_for_places)
    run_log = _read(log_inspection.run_log)
    list_log = _read(log_inspection.list_log)
    log_totals = _read(log_inspection.totals)

    # sampling sessions
    create_sampling_session = _durable(sampling_sessions.create, point="store.create_sampling_session")
    get_sampling_session = _over(sampling_sessions.get_sampling_session)
    count_open_sampling_sessions = _read(sampling_sessions.count_open)
    list_sampling_session_ids = _read(sampling_sessions.ids_of)

    # checkpoints
    get_checkpoint = _read(checkpoints.get)
    list_checkpoints = _read(checkpoints.list_all)
    newest_checkpoints = _read(checkpoints.newest)
    recorded_directories = _read(checkpoints.directories)
    kept_checkpoints = _read(checkpoints.kept)
    add_checkpoint = _over(checkpoints.add_checkpoint)
    update_checkpoint = _durable(checkpoints.update)
    delete_checkpoint = _over(checkpoints.delete_checkpoint)
    delete_version = _over(checkpoints.delete_checkpoint_version)
    deleted_checkpoint = _read(checkpoints.deleted)
    expired_checkpoints = _read(checkpoints.expired)

    # the log, for servers
    submit = _durable(submitting.submit, locks=submitting.models_of, point="store.submit")
    get_operation = _over(requests.get_operation)
    wait_for = _over(requests.wait_for)
    finished_samples = _over(requests.finished_samples)
    is_awaited = _read(requests.is_awaited)
    waiting = _read(requests.waiting)
    pending = _read(transaction.pending)
    list_pending = _read(requests.list_pending)
    cancel = _durable(requests.cancel)

    # the log, for engines
    claim = _over(claiming.claim_operations)
    claim_suspect = _over(claiming.claim_suspect)
    complete = _over(completing.complete_operations)
    failed_pass = _read(log.failed_pass)
    cancelled = _over(requests.cancelled)
    fail_gaps = _over(gaps.fail_gaps)
    wait_for_work = _over(claiming.wait_for_work)

    # engines and their leases
    acquire_lease = _durable(leases.acquire, point="store.acquire_lease")
    renew_lease = _relaxed(leases.renew)
    release_lease = _durable(leases.release)
    wait_for_lease = _over(leases.wait_for_lease)
    report_engine = _over(engine_states.report_engine)
    list_engines = _read(engine_states.list_all)
    overdue_engines = _read(leases.overdue)
    running_since = _read(engine_states.running_since)
    report_figures = _relaxed(engine_states.report_figures)
    list_figures = _read(engine_states.list_figures)

    # recovery
    requeue = _over(recovery.requeue_operations)
    live_models = _read(recovery.live_models)
    begin_rebuild = _relaxed(recovery.begin_rebuild)
    end_rebuild = _relaxed(recovery.end_rebuild)
    replayable = _read(recovery.replayable)
    add_recovery_point = _durable(models.add_recovery_point, point="store.add_recovery_point")
    list_recovery_points = _read(models.recovery_points_of)
    drop_recovery_point = _durable(models.drop_recovery_point)
    lose_run = _durable(runs.lose)
    note_run = _durable(runs.note)

    # what tenants have used and keep
    hourly_usage = _read(usage.hourly)
    total_usage = _read(usage.in_all)
    stored_checkpoints = _read(usage.stored)
    kept_bytes = _read(usage.kept)
    find_routed_experts = _read(routed_experts.find)

    # curves
    log_metrics = _durable(metrics.log, locks=metrics.model_of)
    read_metrics = _read(metrics.read)
    wait_for_metrics = _over(metrics.wait_for_metrics)

    # tokens that are being drawn
    tell_drawn = _relaxed(token_streams.tell)

    def drawn(
        self, sampling_session_id: str, seq_id: int, hear: Callable[[DrawnTokens], None]
    ) -> AbstractContextManager[None]:
        return token_streams.listen(self.connections, sampling_session_id, seq_id, hear)

    # upkeep
    secret = _over(upkeep.secret)
    expect_writes = _over(upkeep.expect_writes)
    prune = _over(retention.prune)
