"""Arguments and results of hooks: the sender of a request, the context of plugin routes, the events for observers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from tinsmith.backend import BackendConfig
from tinsmith.figures import Figures
from tinsmith.operations import Consistency, Failed, Sample, SampleOutput
from tinsmith.phases import Phase, phases_of
from tinsmith.store import (
    DiskUse,
    OperationState,
    PendingWork,
    RequestStore,
    RunRecord,
    SamplingSessionRecord,
    TimedOperation,
)
from tinsmith.store.logins import Login
from tinsmith_checkpoints.values import Json

if TYPE_CHECKING:
    from pathlib import Path

    from fastapi import Request, Response
    from fastapi.routing import APIRoute
    from prometheus_client import CollectorRegistry
    from pydantic import BaseModel

E = TypeVar("E")


@dataclass(frozen=True, slots=True, kw_only=True)
class Principal:
    """The sender of a request. `tenant` owns whatever the request creates; tenants never see each other's objects."""

    tenant: str
    name: str = ""  # shown to people
    admin: bool = False
    login: Login | None = None  # by which they have signed in: what they make with it ends with it


class RouteSampling(ABC):
    """Samples for the routes of plugins: by the same sampling sessions, quotas, queues and log as the SDK's requests.

    All methods raise TinsmithError, which a route may let through. For them, objects of other tenants do not exist.
    """

    @abstractmethod
    async def open(
        self, caller: Principal, *, base_model: str | None = None, model_path: str | None = None
    ) -> SamplingSessionRecord:
        """Return the caller's sampling session of a base model, or of the sampler checkpoint at a tinker:// path.

        It is the same one at every call, so that its prompts find each other's prefixes in the cache, until its
        checkpoint is replaced. It belongs to a session that core creates, and keeps alive while it is used.
        """

    @abstractmethod
    async def sample(
        self, caller: Principal, operation: Sample, *, hear: Callable[[int, Sequence[int]], None] | None = None
    ) -> SampleOutput:
        """Submit the sample and return its result. Cancel it if the call is cancelled.

        `operation` names a sampling session of `open`; its `snapshot_id` is taken from the session, whatever it says.
        `hear` is called with a sequence's number and its next tokens, as they are drawn: with all of them by the time
        of the result. Raise UserError if the sample is refused or fails by the caller's fault.
        """

    @abstractmethod
    async def max_context_tokens(self, base_model: str) -> int:
        """Return how many tokens prompt and continuation may have together.

        Raise CapacityError until the engine has reported it.
        """

    @abstractmethod
    def model_directory(self, base_model: str) -> Path | None:
        """Return the Hugging Face directory of a base model; None if this machine has none. May read the disk."""


class RunReader(ABC):
    """A kind of credential by which others than its owner read the curves of a run, such as a link to it."""

    @abstractmethod
    def shown(self, headers: Mapping[str, str]) -> str | None:
        """Return the credential that a request shows, unchecked; None if it shows none. Names are in lower case.

        Streams are counted by it before anything is read, so it costs next to nothing.
        """

    @abstractmethod
    async def opens(self, credential: str, model_id: str) -> bool:
        """Return whether the credential opens this run now."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ErrorAnswer:
    """An error that the server answers."""

    status: int
    detail: str  # which names what is wrong, and the remedy
    field: str | None = None  # of the body, if one is at fault
    code: str | None = None  # what programs know the error by, if its class has one


@dataclass(frozen=True, slots=True)
class OtherField:
    """A field of a request that has no effect. A body's `other_fields` maps names to them, so that each is told apart.

    Bodies are those of `RoutesContext.json_route`, with `extra="forbid"`, and the models within them.
    """

    note: str  # why it has no meaning, or what to do instead
    neutral: tuple[Json, ...] | None  # the values that may be sent; None: all

    def takes(self, value: Json) -> bool:
        """A null asks for nothing. 1 and 1.0 are one value, 1 and true are not."""
        if value is None or self.neutral is None:
            return True
        return any(value == each and isinstance(value, bool) is isinstance(each, bool) for each in self.neutral)


ErrorForm = Callable[[ErrorAnswer], tuple[int, Mapping[str, Json]]]
"""Makes the status and the JSON body of an error's answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutesContext:
    """Parts of the server that the routes are added to."""

    store: RequestStore  # open while requests are answered; not yet open when the hook is called
    registry: CollectorRegistry  # `/metrics` shows it; a plugin may register its own collectors
    sampling: RouteSampling
    pending: Callable[[], Awaitable[Sequence[PendingWork]]]
    """Returns what is queued and running, at most a second old: asking the store costs more, the more waits."""
    caller: Callable[[Request], Principal]
    """Identifies the sender of a request, as core's routes do: use it as `Depends(context.caller)`."""
    json_route: type[APIRoute]
    """Reads JSON as core's routes do: strictly, and large bodies off the event loop. For `APIRouter(route_class=...)`.

    If the body's model forbids extra fields, an unknown one is refused by name, unless it holds nothing.
    """
    secret: bytes
    """Shared by the servers of one store, and known to nobody else. Derive a key of your own from it, by a name."""
    logins: list[object] = field(default_factory=list)
    """For the plugin that `login.plugin` names: it adds an object with the hook `tinsmith_authenticate`."""
    look_ups: list[Callable[[Mapping[str, str]], Awaitable[None]]] = field(default_factory=list)
    """Called with the headers of each request before anybody is asked who sent it: `tinsmith_authenticate` cannot wait
    for the store. Keep what you read for a second, and ask about nothing that anybody could make up."""
    logins_ended: Callable[[], None] = lambda: None
    """To be called after `end_login` or `end_account`: this server then refuses at once what was made with a login,
    others within a second."""
    error_forms: dict[str, ErrorForm] = field(default_factory=dict)
    """By the prefix of paths: the form of their error answers, those for unknown senders and large bodies included."""
    own_run: Callable[[Principal, str], Awaitable[RunRecord]]
    """Returns the run of a model_id if it is the caller's. Raises NotFoundError if not."""
    actor: Callable[[Request], Awaitable[Mapping[str, str]]]
    """Names the sender of a request for the audit log: use it as `Depends(context.actor)`."""
    large_answer: Callable[[str, Callable[[], Awaitable[Any]], Callable[[Any], BaseModel]], Awaitable[Response]]
    """Takes a tenant, what reads and what makes an answer of it in a thread: one answer of a tenant at a time."""
    disk_uses: Callable[[str | None], Awaitable[Sequence[DiskUse]]]
    """Returns what a tenant keeps and may keep; of all tenants (None)."""
    run_readers: list[RunReader] = field(default_factory=list)
    """Credentials by which others than its owner read the curves of a run."""
    page_parts: list[Path] = field(default_factory=list)
    """JavaScript modules of the page, a file each: it serves and imports them. Their names are unique."""
    figures: Figures = field(default_factory=Figures)
    """This process's counters: a server shows them on `/metrics` beside its engines'."""
    _public: list[object] = field(default_factory=list, init=False, repr=False)

    def public(self, endpoint: E) -> E:
        """Mark the endpoint of a route that needs no key. All others answer an unknown sender with a 401."""
        self._public.append(endpoint)
        return endpoint

    def is_public(self, endpoint: object) -> bool:
        return endpoint in self._public


L = TypeVar("L", bound=BackendConfig)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoginSpec(Generic[L]):
    """A way to sign in: its settings. What signs people in, its plugin adds to `RoutesContext.logins`."""

    name: str
    config: type[L]
    check: Callable[[L], Iterable[str]] | None = None
    """Yields a reason for each obstacle that shows before a server starts, such as a file that cannot be read."""
    description: str = ""


AnyLoginSpec = LoginSpec[Any]  # Any: specs of different configs live in one registry


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerStarted:
    url: str
    base_models: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerStopping:
    url: str


@dataclass(frozen=True, slots=True, kw_only=True)
class OperationFinished:
    request_id: str
    base_model: str
    kind: str
    tenant: str
    model_id: str | None
    num_tokens: int
    queued_s: float  # from submit to claim
    run_s: float  # in the backend, shared by the whole batch; of a sample without its wait for the snapshot
    batch_size: int
    session_id: str = ""
    arrived_at: datetime | None = None
    claimed_at: datetime | None = None  # by the engine
    ran_at: datetime | None = None  # when the call of the backend began
    first_token_s: float | None = None  # of a sample: from then until its first token, if the sampler tells
    failed: Failed | None = None
    consistency: Consistency | None = None  # set for a save for sampling, even if it is refused
    seq_id: int | None = None  # of an operation of a model
    step: int | None = None  # optimizer steps that the model had made before it
    metrics: Mapping[str, float] = field(default_factory=dict)  # of a pass or an optimizer step
    recorded_at: datetime | None = None  # when its result was durable
    traceparent: str | None = None  # of W3C Trace Context, as its request came with it

    def phases(self) -> list[Phase]:
        """Return what it waited for, and what was done for it, in order and without gaps.

        Return nothing if the times of its arrival and its record are not known.
        """
        if self.arrived_at is None or self.recorded_at is None:
            return []
        timed = TimedOperation(
            request_id=self.request_id,
            subject_id=self.model_id or "",
            seq_id=self.seq_id or 0,
            ordered=self.model_id is not None,
            kind=self.kind,
            state=OperationState.SUCCEEDED if self.failed is None else OperationState.FAILED,
            early=False,
            num_tokens=self.num_tokens,
            created_at=self.arrived_at,
            started_at=self.claimed_at,
            ran_at=self.ran_at,
            run_s=self.run_s,
            first_token_s=self.first_token_s,
            finished_at=self.recorded_at,
        )
        return phases_of(timed, self.recorded_at)
