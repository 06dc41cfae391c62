"""The context shared by all routes: settings, store, plugins, and the last reports of the engines."""

import asyncio
import logging
import secrets
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Final, cast

from fastapi import Depends, Request
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector

from tinsmith.figures import Figures
from tinsmith.hook_values import ErrorForm, Principal
from tinsmith.losses import LossSpec
from tinsmith.plugins.loading import Plugins
from tinsmith.protocol.stable_reinforce import StandIn
from tinsmith.server.api_keys import ApiKeys
from tinsmith.server.backlog import Backlog
from tinsmith.server.hearing import Hearing
from tinsmith.server.known import Known, KnownRequest, KnownRun, KnownSession
from tinsmith.server.limits.heavy_work import HeavyWork, LargeAnswers
from tinsmith.server.limits.quotas import Quotas
from tinsmith.server.signed_urls import UrlSigner
from tinsmith.server.storage_health import StorageHealth
from tinsmith.server.unknown_field_counts import UnknownFieldCounts
from tinsmith.settings import Settings
from tinsmith.store import EngineCapabilities, EngineRecord, EngineState, RequestStore, SamplingSessionRecord
from tinsmith_checkpoints.huggingface.hub_cache import HubReference, cached_model

API_PREFIX = "/api/v1"
_ALIVE: Final = frozenset(EngineState) - {EngineState.RESTARTING, EngineState.FAILED, EngineState.STOPPED}
_STALE_AFTER_S: Final = 1.0
_UNNOTICED: Final = 10  # breaks of up to this part of a session's time-out leave its client time for heartbeats
_STALE_STARTING_AFTER_S: Final = 0.1  # while an engine that somebody may wait for is not ready

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Metrics:
    """The server's own metrics."""

    registry: CollectorRegistry
    requests: Counter
    submitted: Counter
    tokens: Counter
    seconds: Histogram
    routing_replay: Counter
    stand_ins: Counter
    unknown_fields: UnknownFieldCounts

    @classmethod
    def create(cls) -> "Metrics":
        registry = CollectorRegistry()
        ProcessCollector(registry=registry)
        Gauge("tinsmith_build_info", "1", ["version"], registry=registry).labels(version("tinsmith")).set(1)
        return cls(
            registry=registry,
            requests=Counter(
                "tinsmith_http_requests", "answers by route and status", ["route", "status"], registry=registry
            ),
            submitted=Counter(
                "tinsmith_operations_submitted", "operations accepted", ["base_model", "kind"], registry=registry
            ),
            tokens=Counter(
                "tinsmith_tokens_submitted", "tokens of accepted operations", ["base_model", "kind"], registry=registry
            ),
            seconds=Histogram(
                "tinsmith_http_seconds", "time to answer, long polls included", ["route"], registry=registry
            ),
            stand_ins=Counter(
                "tinsmith_stand_in_passes",
                "accepted passes for which another loss stands in, by the loss that was asked for and the other one",
                ["base_model", "loss_fn", "stand_in"],
                registry=registry,
            ),
            routing_replay=Counter(
                "tinsmith_routing_replay_sequences",
                "sequences of accepted passes, by whether their experts are those of a sample or the trainer's choice",
                ["base_model", "kind", "outcome"],
                registry=registry,
            ),
            unknown_fields=UnknownFieldCounts(registry),
        )


class Engines:
    """The last reports of the engines, read again from the store after a second, or sooner while some are not ready.

    An engine whose lease has run out is silent, whatever it reported last.
    """

    def __init__(self, store: RequestStore) -> None:
        self._store = store
        self._records: dict[str, EngineRecord] = {}
        self._silent: set[str] = set()  # by engine_id, of those that the log names
        self._read_at = -1e9
        self._lock = asyncio.Lock()

    async def records(self) -> dict[str, EngineRecord]:
        async with self._lock:
            ready = all(record.state is EngineState.READY for record in self._records.values())
            if time.monotonic() - self._read_at > (_STALE_AFTER_S if ready else _STALE_STARTING_AFTER_S):
                overdue = await self._store.overdue_engines()
                reported = await self._store.list_engines()
                self._records = {each.base_model: _as_it_is(each, overdue) for each in reported}
                self._read_at = time.monotonic()
                self._log_silence()
        return self._records

    def _log_silence(self) -> None:
        for record in self._records.values():
            if record.engine_id is None:
                continue
            if record.state is EngineState.SILENT and record.engine_id not in self._silent:
                self._silent.add(record.engine_id)
                _log.warning("the engine of %r is silent: %s", record.base_model, record.detail)
            elif record.state is not EngineState.SILENT and record.engine_id in self._silent:
                self._silent.discard(record.engine_id)
                _log.warning("the engine of %r is no longer silent: it is %s", record.base_model, record.state.value)
        self._silent &= {record.engine_id for record in self._records.values() if record.engine_id is not None}

    async def capabilities(self, base_model: str) -> EngineCapabilities | None:
        """Return None until the engine has reported them."""
        record = (await self.records()).get(base_model)
        return record.capabilities if record is not None else None


def _as_it_is(record: EngineRecord, overdue: Mapping[str, float]) -> EngineRecord:
    """Replace the state of an engine that no longer renews its lease."""
    overdue_s = overdue.get(record.engine_id or "")
    if overdue_s is None or record.state not in _ALIVE:
        return record
    ran_out = datetime.now(UTC) - timedelta(seconds=overdue_s)
    detail = f"it gives no sign of life, and its lease ran out at {ran_out:%H:%M:%S} UTC"
    return replace(record, state=EngineState.SILENT, detail=detail, progress=None)


@dataclass(slots=True, kw_only=True)
class ServerContext:
    """One per app."""

    settings: Settings
    store: RequestStore
    plugins: Plugins
    api_keys: ApiKeys
    losses: Mapping[str, LossSpec]
    stand_in: StandIn | None  # for stable_reinforce
    signer: UrlSigner
    engines: Engines
    quotas: Quotas
    figures: Figures = field(default_factory=Figures)
    metrics: Metrics = field(default_factory=Metrics.create)
    heavy: HeavyWork = field(default_factory=HeavyWork)
    large_answers: LargeAnswers = field(default_factory=LargeAnswers)
    stopping: asyncio.Event = field(default_factory=asyncio.Event)
    server_id: str = field(default_factory=partial(secrets.token_hex, 8))
    error_forms: dict[str, ErrorForm] = field(default_factory=dict)  # those that plugins ask for: see RoutesContext
    backlog: Backlog = field(init=False)
    hearing: Hearing = field(init=False)
    storage: StorageHealth = field(init=False)
    sessions: Known[KnownSession] = field(init=False)
    runs: Known[KnownRun] = field(init=False)
    samplers: Known[SamplingSessionRecord] = field(init=False)
    requests: Known[KnownRequest] = field(init=False)
    _asks_plugins: bool = field(init=False)

    def __post_init__(self) -> None:
        self.backlog = Backlog(self.store)
        self.hearing = Hearing(unnoticed_s=self.settings.server.session_timeout_s / _UNNOTICED)
        self.storage = StorageHealth(self.store, self.quotas.disk)
        self.sessions = Known(self._session)
        self.runs = Known(self._run)
        self.samplers = Known(self.store.get_sampling_session)
        self.requests = Known(self._request)
        self._asks_plugins = self.plugins.authenticators() != [self.api_keys]

    async def _session(self, session_id: str) -> KnownSession:
        return KnownSession((await self.store.get_session(session_id)).tenant)

    async def _run(self, model_id: str) -> KnownRun:
        return KnownRun.of(await self.store.get_run(model_id))

    async def _request(self, request_id: str) -> KnownRequest:
        return KnownRequest((await self.store.get_operation(request_id)).tenant)

    def is_operator(self, caller: Principal | None) -> bool:
        """Return whether a caller may read what operators read: causes of failures, with paths and lines of logs.

        Administrators may, and everybody if nobody needs a key: then tenant and operator are one person.
        """
        if caller is not None and caller.admin:
            return True
        return self.api_keys.accept_anybody and not self._asks_plugins

    @property
    def checkpoint_root(self) -> Path:
        return self.settings.data_dir.checkpoints

    def tokenizer_of(self, base_model: str) -> str:
        """Return where clients find the tokenizer: the model's directory, or its name if they may be elsewhere."""
        if self.settings.server.host not in {"127.0.0.1", "localhost", "::1"}:
            return base_model
        model = self.settings.model(base_model)
        reference = HubReference.parse(model.source)
        path = model.path or (cached_model(reference) if reference is not None else None)
        return base_model if path is None else str(path.expanduser().absolute())

    def now(self) -> datetime:
        return datetime.now(UTC)


def context_of(request: Request) -> ServerContext:
    return cast("ServerContext", request.app.state.context)


async def _context(request: Request) -> ServerContext:
    """FastAPI would call a synchronous dependency in another thread."""
    return context_of(request)


Context = Annotated[ServerContext, Depends(_context)]
