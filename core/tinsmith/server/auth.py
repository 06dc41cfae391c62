"""Who sent a request, and what is theirs. What belongs to another tenant looks as if it did not exist."""

from collections.abc import Callable, Mapping
from typing import Annotated, Literal, TypeVar

from fastapi import Depends, Request

from tinsmith.errors import AuthenticationError, NotFoundError
from tinsmith.hook_values import Principal
from tinsmith.plugins.loading import Plugins
from tinsmith.server.context import Context
from tinsmith.store import CheckpointRecord, OperationRecord, RunRecord, SamplingSessionRecord, SessionRecord

Owned = TypeVar("Owned", SessionRecord, RunRecord, SamplingSessionRecord, CheckpointRecord, OperationRecord)


def authenticated(request: Request, context: Context) -> Principal:
    return who_sent(request.headers, context.plugins)


def who_sent(headers: Mapping[str, str], plugins: Plugins) -> Principal:
    """Ask the plugins; the configured keys come last. Raise AuthenticationError where none knows."""
    principal = plugins.authenticate({name.lower(): value for name, value in headers.items()})
    if principal is None:
        msg = "no plugin knows who sent this request; pass an API key"
        raise AuthenticationError(msg)
    return principal


Caller = Annotated[Principal, Depends(authenticated)]


AccessScope = Literal["owned", "accessible"]


def visible_tenant(caller: Principal, scope: AccessScope) -> str | None:
    """Say whose things a listing shows: one's own, or for an administrator who asks so, everybody's (None)."""
    return None if caller.admin and scope == "accessible" else caller.tenant


def owned(record: Owned, caller: Principal, describe: Callable[[], str]) -> Owned:
    """Return the record, or raise NotFoundError as if it were not there."""
    if record.tenant == caller.tenant or caller.admin:
        return record
    raise NotFoundError(describe())


async def own_session(context: Context, caller: Principal, session_id: str) -> SessionRecord:
    return owned(await context.store.get_session(session_id), caller, lambda: missing("session", session_id))


async def own_run(context: Context, caller: Principal, model_id: str) -> RunRecord:
    return owned(await context.store.get_run(model_id), caller, lambda: missing("model", model_id))


async def own_sampler(context: Context, caller: Principal, sampler_id: str) -> SamplingSessionRecord:
    return owned(
        await context.store.get_sampling_session(sampler_id), caller, lambda: missing("sampling session", sampler_id)
    )


async def own_operation(context: Context, caller: Principal, request_id: str) -> OperationRecord:
    return owned(await context.store.get_operation(request_id), caller, lambda: missing("request", request_id))


async def own_checkpoint(context: Context, caller: Principal, path: str) -> CheckpointRecord:
    return owned(await live_checkpoint(context, path), caller, lambda: missing("checkpoint", path))


async def readable_checkpoint(context: Context, caller: Principal, path: str) -> CheckpointRecord:
    """Return one's own, or one that its owner has published."""
    record = await live_checkpoint(context, path)
    return record if record.public else owned(record, caller, lambda: missing("checkpoint", path))


async def live_checkpoint(context: Context, path: str) -> CheckpointRecord:
    """Raise NotFoundError for one whose time is up, even if it has not been swept away yet."""
    record = await context.store.get_checkpoint(path)
    if record.expires_at is not None and record.expires_at <= context.now():
        raise NotFoundError(missing("checkpoint", path))
    return record


def missing(what: str, name: str) -> str:
    return f"no {what} {name!r}"
