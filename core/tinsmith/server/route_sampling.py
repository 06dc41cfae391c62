"""Samples for the routes of plugins. They are in the log, the quotas and the queues as the SDK's samples are.

Each tenant has a session here, which is heard whenever one of its samples is asked for or waits. So it ends like any
other: if it is not used, or if this server stops. In it is a sampling session for each model that was asked for.
"""

import asyncio
import itertools
import logging
import time
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import ClassVar, Final, NamedTuple
from weakref import WeakValueDictionary

from tinsmith.errors import CapacityError, RevokedError, ServerError, UserError
from tinsmith.hook_values import Principal, RouteSampling
from tinsmith.operations import Failed, Result, Sample, SampleOutput
from tinsmith.protocol import wire
from tinsmith.server.auth import usable_sampler
from tinsmith.server.context import ServerContext
from tinsmith.server.results import as_told, finished_result
from tinsmith.server.routes.sampling import open_sampling_session
from tinsmith.server.routes.sessions import hear, open_session
from tinsmith.server.submitting import submit_sample
from tinsmith.stopping import unless_stopped
from tinsmith.store import DrawnTokens, OperationRecord, SamplingSessionRecord

_SESSION: Final = wire.CreateSessionRequest(display_name="routes of plugins")
_HEARTBEAT_S: Final = 10.0  # as clients send them
_MOST_TENANTS: Final = 10_000
_MOST_MODELS: Final = 1000  # of one tenant; the sampling session of another one is opened again

_log = logging.getLogger(__name__)


class FailedSampleError(ServerError):
    """A sample failed by the server's fault. The message is fit for its caller."""

    public: ClassVar[bool] = True


class StoppingError(ServerError):
    """The server stops before the sample has finished."""

    http_status: ClassVar[int] = 503
    public: ClassVar[bool] = True


class _Model(NamedTuple):
    base_model: str | None
    path: str | None


@dataclass(slots=True)
class _Tenant:
    """A tenant's session, and its sampling sessions, those asked for last at the end."""

    session_id: str
    heard_s: float
    opened: OrderedDict[_Model, SamplingSessionRecord] = field(default_factory=OrderedDict)
    numbers: Callable[[], int] = field(default_factory=lambda: itertools.count(1).__next__)


class TenantSampling(RouteSampling):
    """One per app."""

    def __init__(self, context: ServerContext) -> None:
        self._context = context
        self._tenants: OrderedDict[str, _Tenant] = OrderedDict()
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._seq_ids = itertools.count(1)
        self._cancelling: set[asyncio.Task[OperationRecord]] = set()

    async def open(
        self, caller: Principal, *, base_model: str | None = None, model_path: str | None = None
    ) -> SamplingSessionRecord:
        model = _Model(base_model, model_path)
        async with self._locks.setdefault(caller.tenant, asyncio.Lock()):
            tenant = await self._live(caller)
            known = tenant.opened.pop(model, None)
            if known is None or not await self._is_usable(caller, known):
                known = await open_sampling_session(
                    self._context,
                    caller,
                    session_id=tenant.session_id,
                    number=tenant.numbers(),
                    base_model=base_model,
                    model_path=model_path,
                )
            tenant.opened[model] = known
            if len(tenant.opened) > _MOST_MODELS:
                tenant.opened.popitem(last=False)
            return known

    async def sample(
        self, caller: Principal, operation: Sample, *, hear: Callable[[int, Sequence[int]], None] | None = None
    ) -> SampleOutput:
        sampler = await usable_sampler(self._context, caller, operation.sampling_session_id)
        seq_id = next(self._seq_ids)
        whole = replace(operation, snapshot_id=sampler.snapshot_id, streamed=hear is not None)
        if hear is None:
            return await self._sample(caller, sampler, seq_id, whole)
        heard = HeardTokens(hear)
        with self._context.store.drawn(sampler.sampling_session_id, seq_id, heard.add):
            output = await self._sample(caller, sampler, seq_id, whole)
        heard.finish(output)
        return output

    async def _sample(
        self, caller: Principal, sampler: SamplingSessionRecord, seq_id: int, whole: Sample
    ) -> SampleOutput:
        request_id = await submit_sample(
            self._context, sampler, seq_id, lambda: whole, body_bytes=whole.prompt_P.nbytes
        )
        finished = None
        try:
            finished = await self._finished(sampler.session_id, request_id)
        finally:
            if finished is None:
                self._cancel(request_id)
        result = await finished_result(finished, _unchanged)
        if isinstance(result, SampleOutput):
            return result
        assert isinstance(result, Failed)
        told = await as_told(self._context, caller, result)
        raise UserError(told.message) if told.category == "user" else FailedSampleError(told.message)

    async def max_context_tokens(self, base_model: str) -> int:
        capabilities = await self._context.engines.capabilities(base_model)
        if capabilities is None:
            msg = f"the context length of {base_model!r} is not known until the model has loaded; try again"
            raise CapacityError(msg, queue_state="paused_capacity")
        return capabilities.trainer.max_context_tokens

    def model_directory(self, base_model: str) -> Path | None:
        model = self._context.settings.model(base_model)
        found = model.path or self._context.plugins.resolve_base_model(model.source)
        return None if found is None else found.expanduser().absolute()

    async def _live(self, caller: Principal) -> _Tenant:
        """Return the tenant's session, a new one if there is none, or if it has ended."""
        tenant = self._tenants.pop(caller.tenant, None)
        if tenant is None or not await self._is_alive(tenant):
            session = await open_session(self._context, caller, _SESSION)
            tenant = _Tenant(session.session_id, time.monotonic())
        self._tenants[caller.tenant] = tenant
        if len(self._tenants) > _MOST_TENANTS:
            self._tenants.popitem(last=False)
        return tenant

    async def _is_alive(self, tenant: _Tenant) -> bool:
        now_s = time.monotonic()
        if now_s - tenant.heard_s < _HEARTBEAT_S:
            session = await self._context.store.get_session(tenant.session_id)
        else:
            session = await hear(self._context, tenant.session_id)
            tenant.heard_s = now_s
        return session.ended is None

    async def _is_usable(self, caller: Principal, sampler: SamplingSessionRecord) -> bool:
        try:
            await usable_sampler(self._context, caller, sampler.sampling_session_id)
        except RevokedError:
            return False
        return True

    async def _finished(self, session_id: str, request_id: str) -> OperationRecord:
        while True:
            wait = self._context.store.wait_for(request_id, _HEARTBEAT_S)
            found = await unless_stopped(self._context.stopping, wait)
            if found is None:
                msg = "the server is stopping; send the request again"
                raise StoppingError(msg)
            if found.state.is_finished:
                return found
            await hear(self._context, session_id)

    def _cancel(self, request_id: str) -> None:
        """In a task of its own: the caller may be cancelled, and again at whatever it waits for."""
        task = asyncio.get_running_loop().create_task(self._context.store.cancel(request_id))
        self._cancelling.add(task)
        task.add_done_callback(self._cancelled)

    def _cancelled(self, task: asyncio.Task[OperationRecord]) -> None:
        self._cancelling.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.warning("a sample could not be cancelled, and ends by itself: %s", error)


def _unchanged(result: Result) -> Result:
    return result


class DrawnAgainError(ServerError):
    """A client has read tokens that are not in the result."""

    public: ClassVar[bool] = True


class HeardTokens:
    """The tokens of one sample as they arrive: each once and in order, whatever is told twice or lost."""

    def __init__(self, hear: Callable[[int, Sequence[int]], None]) -> None:
        """`hear` is called with a sequence's number, and its next tokens."""
        self._hear = hear
        self._heard: defaultdict[int, list[int]] = defaultdict(list)

    def add(self, piece: DrawnTokens) -> None:
        """Pass on new tokens. Tokens after a gap come with the result."""
        known = len(self._heard[piece.sequence])
        if piece.first <= known:
            self._add(piece.sequence, piece.tokens[known - piece.first :])

    def finish(self, output: SampleOutput) -> None:
        """Pass on the rest. Raise DrawnAgainError if the result does not begin with the tokens passed on."""
        for index, sequence in enumerate(output.sequences):
            tokens, heard = sequence.tokens.tolist(), self._heard[index]
            if tokens[: len(heard)] != heard:
                msg = (
                    "the engine ended while it drew this sample, and drew it again with other tokens than those that "
                    "were streamed; send the request again"
                )
                raise DrawnAgainError(msg)
            self._add(index, tokens[len(heard) :])

    def _add(self, sequence: int, tokens: Sequence[int]) -> None:
        if tokens:
            self._heard[sequence].extend(tokens)
            self._hear(sequence, tokens)
