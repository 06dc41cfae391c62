"""The context shared by all routes: settings, store, plugins, and values kept in memory for all requests."""

import asyncio
import secrets
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Annotated, Final, cast

from fastapi import Depends, Request

from tinsmith.figures import Figures
from tinsmith.hook_values import ErrorForm, Principal, RunReader
from tinsmith.losses import LossSpec
from tinsmith.plugins.loading import Plugins
from tinsmith.protocol.stable_reinforce import StandIn
from tinsmith.server.api_keys import ApiKeys
from tinsmith.server.hearing import Hearing
from tinsmith.server.kept import Engines, Known, KnownOwner, KnownRun, Reading, rarely
from tinsmith.server.limits.heavy_work import HeavyWork, LargeAnswers
from tinsmith.server.limits.open_streams import OpenStreams
from tinsmith.server.limits.quotas import Quotas
from tinsmith.server.metrics import Metrics
from tinsmith.server.refusal_log import RefusalLog
from tinsmith.server.rollout_views import directory_of
from tinsmith.server.run_streams import RunStreams
from tinsmith.server.sequence_ids import SequenceIds
from tinsmith.server.signed_urls import UrlSigner
from tinsmith.server.storage_health import StorageHealth
from tinsmith.server.waits import Waits, read_waits
from tinsmith.settings import Settings
from tinsmith.store import OperationRecord, PendingWork, RequestStore, SamplingSessionRecord, SessionRecord
from tinsmith_checkpoints.huggingface.hub_cache import HubReference, cached_model
from tinsmith_checkpoints.huggingface.whole_files import WITHOUT_TEXT, lacks_tokenizer

API_PREFIX = "/api/v1"
_UNNOTICED: Final = 10  # breaks of up to this part of a session's time-out leave its client time for heartbeats


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
    sequence_ids: SequenceIds
    engines: Engines
    quotas: Quotas
    figures: Figures = field(default_factory=Figures)
    metrics: Metrics = field(default_factory=Metrics)
    refusal_log: RefusalLog = field(default_factory=RefusalLog)
    heavy: HeavyWork = field(default_factory=HeavyWork)
    large_answers: LargeAnswers = field(default_factory=LargeAnswers)
    stopping: asyncio.Event = field(default_factory=asyncio.Event)
    server_id: str = field(default_factory=partial(secrets.token_hex, 8))
    asks_plugins: bool = False  # who sent a request, and not only the API keys
    error_forms: dict[str, ErrorForm] = field(default_factory=dict)  # those that plugins ask for: see RoutesContext
    run_readers: list[RunReader] = field(default_factory=list)
    backlog: Reading[Sequence[PendingWork]] = field(init=False)
    waits: Reading[Waits] = field(init=False)
    hearing: Hearing = field(init=False)
    storage: StorageHealth = field(init=False)
    run_streams: RunStreams = field(init=False)
    open_streams: OpenStreams = field(init=False)
    sessions: Known[KnownOwner] = field(init=False)
    runs: Known[KnownRun] = field(init=False)
    samplers: Known[SamplingSessionRecord] = field(init=False)
    requests: Known[KnownOwner] = field(init=False)

    def __post_init__(self) -> None:
        self.backlog = rarely(self.store.list_pending)
        self.waits = rarely(partial(read_waits, self.store, self.settings.quotas, self.engines))
        self.hearing = Hearing(unnoticed_s=self.settings.server.session_timeout_s / _UNNOTICED)
        self.storage = StorageHealth(self.store, self.quotas.disk)
        self.run_streams = RunStreams(self.store, self.stopping)
        self.open_streams = OpenStreams(self.settings.server.limits, self.settings.quotas)
        self.sessions = Known(lambda name: _owner_of(self.store.get_session(name)))
        self.runs = Known(self._run)
        self.samplers = Known(self.store.get_sampling_session)
        self.requests = Known(lambda name: _owner_of(self.store.get_operation(name)))

    async def _run(self, model_id: str) -> KnownRun:
        return KnownRun.of(await self.store.get_run(model_id))

    def is_operator(self, caller: Principal | None) -> bool:
        """Return whether a caller may read what operators read: causes of failures, with paths and lines of logs.

        Administrators may, and everybody if nobody needs a key: then tenant and operator are one person.
        """
        if caller is not None and caller.admin:
            return True
        return self.api_keys.accept_anybody and not self.asks_plugins

    def without_text(self, base_model: str) -> str | None:
        """Return why this server cannot read or write text of a base model; None if it can, as far as it sees."""
        directory = directory_of(base_model, self.settings, self.plugins)
        return WITHOUT_TEXT if directory is not None and lacks_tokenizer(directory) else None

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


async def _owner_of(found: Awaitable[SessionRecord | OperationRecord]) -> KnownOwner:
    return KnownOwner((await found).tenant)


def context_of(request: Request) -> ServerContext:
    return cast("ServerContext", request.app.state.context)


async def _context(request: Request) -> ServerContext:
    """FastAPI would call a synchronous dependency in another thread."""
    return context_of(request)


Context = Annotated[ServerContext, Depends(_context)]
