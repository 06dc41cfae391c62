"""SqlStore: the request store over SQLAlchemy. Writes go through the group commit, reads through a few connections.

`SqlStore` maps each method of the store to a function of a subject, and to the connection that runs it.
"""

import asyncio
from collections.abc import Callable, Coroutine
from contextlib import AbstractContextManager, suppress
from datetime import datetime
from functools import partial
from typing import Any, Concatenate, ParamSpec, TypeVar

from sqlalchemy import Connection

from tinsmith.failpoints import durable_boundary
from tinsmith.lasting import start_lasting
from tinsmith.sql_store.config import SqlStoreConfig
from tinsmith.sql_store.connections import Connections
from tinsmith.sql_store.group_commit import Call
from tinsmith.sql_store.subjects import (
    api_keys,
    audit,
    checkpoints,
    claiming,
    completing,
    engines,
    gaps,
    kept_bytes,
    log,
    logins,
    metrics,
    models,
    origins,
    places,
    recovery,
    requests,
    rollouts,
    runs,
    sampling,
    sessions,
    submitting,
    upkeep,
)
from tinsmith.sql_store.transaction import Transaction
from tinsmith.store import DrawnTokens, RequestStore, SessionRecord, StoreContext
from tinsmith.store.wakeups import drawn_topic, lease_topic, places_topic, work_topic

P = ParamSpec("P")
T = TypeVar("T")

Async = Coroutine[Any, Any, T]
Method = Callable[Concatenate["SqlStore", P], Async[T]]


def _read(function: Callable[Concatenate[Connection, P], T]) -> Method[P, T]:
    """Make the method that runs a function in a transaction that only reads."""

    async def method(store: "SqlStore", /, *args: P.args, **options: P.kwargs) -> T:
        result: T = await store.connections.reader.ask(Call(function, args, options))
        return result

    return method


def _select(ask: Callable[..., T], *names: str) -> Callable[..., Async[T]]:
    """Make the method that is one query: its parameters, by these names, are those of the text."""

    def function(connection: Connection, *args: Any, **options: Any) -> T:  # Any: as in the text
        return ask(connection, **dict(zip(names, args, strict=False)), **options)

    return _read(function)


def _durable(function: Callable[Concatenate[Transaction, P], T], point: str | None = None) -> Method[P, T]:
    """Make the method that runs a function in a durable transaction."""

    async def method(store: "SqlStore", /, *args: P.args, **options: P.kwargs) -> T:
        result: T = await store.connections.durable.ask(Call(function, args, options))
        return result

    return method if point is None else durable_boundary(point)(method)


def _relaxed(function: Callable[Concatenate[Transaction, P], T], point: str | None = None) -> Method[P, T]:
    """Make the method that runs a function in a transaction that a power cut may undo."""

    async def method(store: "SqlStore", /, *args: P.args, **options: P.kwargs) -> T:
        result: T = await store.connections.relaxed.ask(Call(function, args, options))
        return result

    return method if point is None else durable_boundary(point)(method)


def _over(function: Callable[Concatenate[Connections, P], Async[T]]) -> Method[P, T]:
    """Make the method that does what takes more than one transaction."""

    def method(store: "SqlStore", /, *args: P.args, **options: P.kwargs) -> Async[T]:
        return function(store.connections, *args, **options)

    return method


class SqlStore(RequestStore):
    """Creating it does no I/O. It raises ConfigError for a URL that cannot be used."""

    def __init__(self, config: SqlStoreConfig, context: StoreContext) -> None:
        self._config = config
        self.connections = Connections(config, context)
        self._sweeper: asyncio.Task[None] | None = None

    @property
    def max_value_bytes(self) -> int:
        return self._config.max_value_bytes

    async def open(self) -> None:
        await self.connections.open()
        self._heartbeats = sessions.Heartbeats(self.connections.relaxed)
        self._heartbeats.open()
        sweep = partial(log.sweep, self.connections, self._config.safety_poll_s)
        self._sweeper = start_lasting(sweep, name="sql-safety-poll")

    async def close(self) -> None:
        if self._sweeper is None:
            return
        self._sweeper.cancel()
        with suppress(asyncio.CancelledError):
            await self._sweeper
        self._sweeper = None
        await self._heartbeats.close()
        await self.connections.close()

    # what packages keep
    async def read(self, function: Callable[Concatenate[Connection, P], T], *args: P.args, **options: P.kwargs) -> T:
        return await self.connections.reader.read(function, *args, **options)

    async def write(self, function: Callable[Concatenate[Transaction, P], T], *args: P.args, **options: P.kwargs) -> T:
        return await self.connections.durable.write(function, *args, **options)

    # sessions
    create_session = _durable(sessions.create, "store.create_session")
    get_session = _read(sessions.get)
    find_sessions = _read(sessions.find)
    list_sessions = _read(sessions.list_all)
    walk_sessions = _read(sessions.walk)
    count_live_sessions = _select(sessions.NUM_LIVE.one, "tenant")
    update_session = _durable(sessions.update)
    end_session = _over(sessions.end_session)
    unload_run = _over(sessions.unload_run)
    expire_sessions = _over(sessions.expire_sessions)
    forget_sessions = _over(upkeep.forget_sessions)

    async def hear_session(self, session_id: str, at: datetime, *, server_id: str | None = None) -> SessionRecord:
        return await self._heartbeats.record(sessions.Heartbeat(session_id, at, server_id))

    # models
    create_run = _durable(runs.create, "store.create_run")
    add_unloaded_run = _durable(runs.add_unloaded)
    count_live_models = _select(runs.NUM_LIVE.one, "tenant")
    get_run = _read(runs.get)
    list_runs = _read(runs.list_all)
    admit_models = _over(places.admit_models)
    park_model = _durable(places.park, "store.park_model")
    return_model = _durable(places.bring_back, "store.return_model")
    count_places = _read(places.count)
    run_log = _read(runs.run_log)
    list_log = _read(runs.list_log)
    list_times = _read(runs.list_times)
    log_totals = _select(runs.TOTALS.all, "model_id")

    async def wait_for_places(self, base_model: str, timeout_s: float) -> None:
        await self.connections.wakeups.wait_for(places_topic(base_model), timeout_s)

    # sampling sessions
    create_sampling_session = _durable(sampling.create, "store.create_sampling_session")
    get_sampling_session = _over(sampling.get_sampling_session)
    count_open_sampling_sessions = _select(sampling.NUM_OPEN.one, "tenant")
    list_sampling_session_ids = _select(sampling.IDS.all, "session_id")

    # checkpoints
    get_checkpoint = _read(checkpoints.get)
    list_checkpoints = _read(checkpoints.list_all)
    walk_checkpoints = _read(checkpoints.walk)
    checkpoints_of_sessions = _read(checkpoints.of_sessions)
    newest_checkpoints = _read(checkpoints.newest)
    recorded_directories = _read(checkpoints.directories)
    kept_checkpoints = _select(checkpoints.KEPT.one, "tenant")
    add_checkpoint = _durable(checkpoints.add)
    update_checkpoint = _durable(checkpoints.update)
    delete_checkpoint = _durable(checkpoints.delete, "store.delete_checkpoint")
    delete_version = _durable(checkpoints.delete_version, "store.delete_checkpoint")
    deleted_checkpoint = _read(checkpoints.deleted)
    expired_checkpoints = _select(checkpoints.EXPIRED.all, "now")

    # the log, for servers
    submit = _durable(submitting.submit, "store.submit")
    get_operation = _over(requests.get_operation)
    wait_for = _over(requests.wait_for)
    finished_samples = _over(requests.finished_samples)
    is_awaited = _read(requests.is_awaited)
    waiting = _read(requests.waiting)
    pending = _read(requests.pending)
    list_pending = _read(requests.list_pending)
    next_requests = _read(requests.next_requests)
    cancel = _durable(requests.cancel)

    # the log, for engines
    claim = _relaxed(claiming.claim, "store.claim")
    claim_suspect = _over(claiming.claim_suspect)
    complete = _durable(completing.complete, "store.complete")
    failed_pass = _read(log.failed_pass)
    cancelled = _over(requests.cancelled)
    fail_gaps = _over(gaps.fail_gaps)

    async def wait_for_work(self, base_model: str, timeout_s: float) -> None:
        await self.connections.wakeups.wait_for(work_topic(base_model), timeout_s)

    # engines and their leases
    acquire_lease = _durable(engines.acquire, "store.acquire_lease")
    renew_lease = _relaxed(engines.renew)
    release_lease = _durable(engines.release)
    report_engine = _over(engines.report_engine)
    list_engines = _select(engines.LIST.all)
    overdue_engines = _read(engines.overdue)
    running_since = _read(engines.running_since)
    report_figures = _relaxed(engines.report_figures)
    list_figures = _select(engines.FIGURES.all)

    async def wait_for_lease(self, base_model: str, timeout_s: float) -> None:
        await self.connections.wakeups.next(lease_topic(base_model), timeout_s)

    # recovery
    requeue = _durable(recovery.requeue, "store.requeue")
    live_models = _read(recovery.live_models)
    begin_rebuild = _relaxed(recovery.begin_rebuild)
    end_rebuild = _relaxed(recovery.end_rebuild)
    replayable = _select(recovery.REPLAYABLE.all, "model_id")
    add_recovery_point = _durable(recovery.add_recovery_point, "store.add_recovery_point")
    list_recovery_points = _select(models.POINTS.all, "model_id")
    drop_recovery_point = _durable(recovery.drop_recovery_point)
    lose_run = _durable(runs.lose)
    note_run = _durable(runs.note)

    # what tenants have used and keep
    kept_bytes = _read(kept_bytes.kept)
    find_routed_experts = _read(sampling.find_experts)

    # curves
    log_metrics = _durable(metrics.log)
    read_metrics = _read(metrics.read)
    wait_for_metrics = _over(metrics.wait_for_metrics)

    # API keys made over HTTP
    add_api_key = _durable(api_keys.add)
    find_api_key = _select(api_keys.FIND.first, "key_id")
    list_api_keys = _read(api_keys.list_all)
    count_api_keys = _select(api_keys.NUMBER.one, "tenant")
    delete_api_key = _durable(api_keys.delete)

    # sign-ins of browsers
    end_login = _durable(logins.end)
    ended_login = _read(logins.ended)

    # the audit log
    add_audit_entry = _relaxed(audit.add)
    read_audit = _read(audit.read)
    prune_audit = _over(upkeep.prune_audit)

    # lineage
    origins_of = _read(origins.of_runs)
    derived_from = _read(origins.derived_from)

    # rollouts
    log_rewards = _durable(rollouts.log_rewards)
    rollout_steps = _read(rollouts.steps)
    read_rollouts = _read(rollouts.read)
    samples_of = _read(sampling.samples_of)

    # tokens that are being drawn
    tell_drawn = _relaxed(sampling.tell)

    def drawn(
        self, sampling_session_id: str, seq_id: int, hear: Callable[[DrawnTokens], None]
    ) -> AbstractContextManager[None]:
        decoded = partial(DrawnTokens.decoded, sampling_session_id, seq_id)
        topic = drawn_topic(sampling_session_id, seq_id)
        return self.connections.wakeups.listen(topic, lambda text: hear(decoded(text)))

    # upkeep
    secret = _over(upkeep.secret)
    expect_writes = _over(upkeep.expect_writes)
    prune = _over(upkeep.prune)
