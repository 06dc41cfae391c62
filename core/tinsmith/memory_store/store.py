"""MemoryStore: the request store in memory. It maps each method of the store to a function of a subject.

Each such function is one transaction on the `Memory`. Methods that wait are written out here: they read again whenever
a topic is told.
"""

import asyncio
from collections.abc import Callable, Coroutine
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, Concatenate, ParamSpec, TypeVar

from tinsmith.errors import StoreError
from tinsmith.memory_store.memory import Memory
from tinsmith.memory_store.subjects import (
    api_keys,
    audit,
    checkpoints,
    claiming,
    completing,
    custom_losses,
    engines,
    gaps,
    log,
    logins,
    metrics,
    origins,
    places,
    recovery,
    requests,
    rollouts,
    runs,
    sampling,
    sessions,
    share_links,
    submitting,
    upkeep,
    usage,
)
from tinsmith.store import DrawnTokens, FinishedSamples, OperationRecord, RequestStore
from tinsmith.store.wakeups import (
    WakeUps,
    done_topic,
    drawn_topic,
    lease_topic,
    metrics_topic,
    places_topic,
    samples_topic,
    work_topic,
)

P = ParamSpec("P")
T = TypeVar("T")


def _transaction(
    function: Callable[Concatenate[Memory, P], T],
) -> Callable[Concatenate["MemoryStore", P], Coroutine[Any, Any, T]]:
    """Make the method that runs a function alone, and then wakes the waiters for its changes."""

    async def method(store: "MemoryStore", /, *args: P.args, **options: P.kwargs) -> T:
        return store.transact(function, *args, **options)

    return method


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

    def transact(self, function: Callable[Concatenate[Memory, P], T], *args: P.args, **options: P.kwargs) -> T:
        """Call a function with the memory while nobody else uses it. Raise StoreError if the store is not open."""
        if self._loop is None:
            msg = "the request store is closed"
            raise StoreError(msg)
        memory = self._memory
        with memory.lock:
            try:
                return function(memory, *args, **options)
            finally:
                topics, memory.told = memory.told, []
                for tell in list(memory.tell_all) if topics else ():
                    tell(topics)

    def _tell(self, topics: list[str]) -> None:
        """Wake what waits here, from any thread."""
        loop = self._loop
        if loop is not None and not loop.is_closed():
            loop.call_soon_threadsafe(self._wakeups.wake, topics)

    # sessions
    create_session = _transaction(sessions.create)
    get_session = _transaction(sessions.get)
    find_sessions = _transaction(sessions.find)
    list_sessions = _transaction(sessions.list_all)
    walk_sessions = _transaction(sessions.walk)
    count_live_sessions = _transaction(sessions.count_live)
    hear_session = _transaction(sessions.hear)
    update_session = _transaction(sessions.update)
    end_session = _transaction(sessions.end)
    unload_run = _transaction(sessions.unload)
    expire_sessions = _transaction(sessions.expire)
    forget_sessions = _transaction(upkeep.forget_sessions)

    # models
    create_run = _transaction(runs.create)
    add_unloaded_run = _transaction(runs.add_unloaded)
    count_live_models = _transaction(runs.count_live)
    get_run = _transaction(runs.get)
    list_runs = _transaction(runs.list_all)
    admit_models = _transaction(places.admit)
    park_model = _transaction(places.park)
    return_model = _transaction(places.bring_back)
    count_places = _transaction(places.count)
    run_log = _transaction(runs.run_log)
    list_log = _transaction(runs.list_log)
    list_times = _transaction(runs.list_times)
    log_totals = _transaction(runs.log_totals)

    async def wait_for_places(self, base_model: str, timeout_s: float) -> None:
        await self._wakeups.wait_for(places_topic(base_model), timeout_s)

    # sampling sessions
    create_sampling_session = _transaction(sampling.create)
    get_sampling_session = _transaction(sampling.get)
    count_open_sampling_sessions = _transaction(sampling.count_open)
    list_sampling_session_ids = _transaction(sampling.list_ids)

    # checkpoints
    get_checkpoint = _transaction(Memory.checkpoint)
    list_checkpoints = _transaction(checkpoints.list_all)
    walk_checkpoints = _transaction(checkpoints.walk)
    checkpoints_of_sessions = _transaction(checkpoints.of_sessions)
    newest_checkpoints = _transaction(checkpoints.newest)
    recorded_directories = _transaction(checkpoints.directories)
    kept_checkpoints = _transaction(checkpoints.kept)
    add_checkpoint = _transaction(checkpoints.add)
    update_checkpoint = _transaction(checkpoints.update)
    delete_checkpoint = _transaction(checkpoints.delete)
    delete_version = _transaction(checkpoints.delete_version)
    deleted_checkpoint = _transaction(checkpoints.deleted)
    expired_checkpoints = _transaction(checkpoints.expired)

    # the log, for servers
    submit = _transaction(submitting.submit)
    get_operation = _transaction(requests.get)
    is_awaited = _transaction(requests.is_awaited)
    waiting = _transaction(requests.waiting)
    pending = _transaction(requests.pending)
    list_pending = _transaction(requests.list_pending)
    next_requests = _transaction(requests.next_requests)
    cancel = _transaction(requests.cancel)
    _finished_samples = _transaction(requests.finished)

    async def wait_for(self, request_id: str, timeout_s: float) -> OperationRecord:
        return await self._wakeups.read_until(
            lambda operation: operation.state.is_finished,
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

    # the log, for engines
    claim = _transaction(claiming.claim)
    claim_suspect = _transaction(claiming.claim_suspect)
    complete = _transaction(completing.complete)
    failed_pass = _transaction(log.failed_pass)
    cancelled = _transaction(requests.cancelled)
    fail_gaps = _transaction(gaps.fail_gaps)

    async def wait_for_work(self, base_model: str, timeout_s: float) -> None:
        await self._wakeups.wait_for(work_topic(base_model), timeout_s)

    # engines and their leases
    acquire_lease = _transaction(engines.acquire)
    renew_lease = _transaction(engines.renew)
    release_lease = _transaction(engines.release)
    report_engine = _transaction(engines.report)
    list_engines = _transaction(engines.list_all)
    overdue_engines = _transaction(engines.overdue)
    running_since = _transaction(engines.running_since)
    report_figures = _transaction(engines.report_figures)
    list_figures = _transaction(engines.list_figures)

    async def wait_for_lease(self, base_model: str, timeout_s: float) -> None:
        await self._wakeups.next(lease_topic(base_model), timeout_s)

    # recovery
    requeue = _transaction(recovery.requeue)
    live_models = _transaction(recovery.live_models)
    begin_rebuild = _transaction(recovery.begin_rebuild)
    end_rebuild = _transaction(recovery.end_rebuild)
    replayable = _transaction(log.replayable)
    add_recovery_point = _transaction(recovery.add_recovery_point)
    list_recovery_points = _transaction(recovery.list_recovery_points)
    drop_recovery_point = _transaction(recovery.drop_recovery_point)
    lose_run = _transaction(runs.lose)
    note_run = _transaction(runs.note)

    # what tenants have used and keep
    hourly_usage = _transaction(usage.hourly)
    total_usage = _transaction(usage.in_all)
    stored_checkpoints = _transaction(usage.stored)
    kept_bytes = _transaction(usage.kept)
    find_routed_experts = _transaction(sampling.find_experts)

    # curves
    log_metrics = _transaction(metrics.log)
    read_metrics = _transaction(metrics.read)
    _metrics_written = _transaction(metrics.written)

    async def wait_for_metrics(self, model_id: str, *, known: int, timeout_s: float) -> int:
        return await self._wakeups.read_until(
            lambda found: found > known,
            partial(self._metrics_written, model_id),
            topic=metrics_topic(model_id),
            timeout_s=timeout_s,
        )

    # custom losses
    create_custom_loss = _transaction(custom_losses.create)
    get_custom_loss = _transaction(custom_losses.get)

    # links to runs
    add_share_link = _transaction(share_links.add)
    find_share_link = _transaction(share_links.find)
    list_share_links = _transaction(share_links.of_run)
    delete_share_link = _transaction(share_links.delete)

    # API keys made over HTTP
    add_api_key = _transaction(api_keys.add)
    find_api_key = _transaction(api_keys.find)
    list_api_keys = _transaction(api_keys.list_all)
    count_api_keys = _transaction(api_keys.count)
    delete_api_key = _transaction(api_keys.delete)

    # sign-ins of browsers
    end_login = _transaction(logins.end)
    is_login_ended = _transaction(logins.is_ended)

    # the audit log
    add_audit_entry = _transaction(audit.add)
    read_audit = _transaction(audit.read)
    prune_audit = _transaction(audit.prune)

    # lineage
    origins_of = _transaction(origins.of_runs)
    derived_from = _transaction(origins.derived_from)

    # rollouts
    log_rewards = _transaction(rollouts.log_rewards)
    rollout_steps = _transaction(rollouts.steps)
    read_rollouts = _transaction(rollouts.read)
    samples_of = _transaction(sampling.samples_of)

    # tokens that are being drawn
    tell_drawn = _transaction(sampling.tell)

    def drawn(
        self, sampling_session_id: str, seq_id: int, hear: Callable[[DrawnTokens], None]
    ) -> AbstractContextManager[None]:
        decoded = partial(DrawnTokens.decoded, sampling_session_id, seq_id)
        return self._wakeups.listen(drawn_topic(sampling_session_id, seq_id), lambda text: hear(decoded(text)))

    # upkeep
    secret = _transaction(upkeep.secret)
    prune = _transaction(upkeep.prune)

    async def expect_writes(self) -> None:
        """Memory can always be written."""
