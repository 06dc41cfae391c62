"""Identifies the sender of a request, and checks what this caller may read and change.

An object belongs to a tenant. Only its tenant changes it (`own_*`); its tenant and administrators read it
(`readable_*`), and everybody reads a published checkpoint. To all others it does not exist: they get a 404.
"""

import asyncio
from collections.abc import Callable
from typing import Annotated, Final, Literal, NamedTuple, TypeVar

from fastapi import Depends, Request
from starlette.concurrency import run_in_threadpool
from starlette.datastructures import Headers
from starlette.types import Scope

from tinsmith import log_fields
from tinsmith.checkpoints import saved as checkpoints
from tinsmith.errors import AuthenticationError, NotFoundError, TinsmithError, UserError
from tinsmith.hook_values import Principal, RunReader
from tinsmith.operations import ReadRight
from tinsmith.server.api_keys import credential_of
from tinsmith.server.context import Context, ServerContext
from tinsmith.server.kept import KnownOwner, KnownRun
from tinsmith.store import (
    CheckpointRecord,
    OperationRecord,
    RunRecord,
    SamplingSessionRecord,
    SessionRecord,
)
from tinsmith.store.refusals import no_such
from tinsmith.store.revocation import revoked, usable_checkpoint

Owned = TypeVar(
    "Owned",
    SessionRecord,
    RunRecord,
    KnownOwner,
    KnownRun,
    SamplingSessionRecord,
    CheckpointRecord,
    OperationRecord,
    KnownOwner,
)

_CALLER: Final = "tinsmith.caller"
"""Key of the scope: who sent the request, or why that is not known, once it has been asked."""


def identified(scope: Scope, context: ServerContext) -> Principal:
    """Return who sent a request, asking only once for each. Raises AuthenticationError if nobody knows the caller."""
    known: Principal | TinsmithError | None = scope.get(_CALLER)
    if known is None:
        try:
            known = _who_sent(scope, context)
            log_fields.note(tenant=known.tenant)
        except TinsmithError as error:
            known = error
        scope[_CALLER] = known
    if isinstance(known, TinsmithError):
        raise known
    return known


def known_caller(scope: Scope) -> Principal | None:
    """Return who sent a request, if anybody has asked and it is known."""
    known = scope.get(_CALLER)
    return known if isinstance(known, Principal) else None


def forget_caller(scope: Scope) -> None:
    """Make the route authenticate again: keys may have been removed while a slow body was read."""
    scope.pop(_CALLER, None)


def _who_sent(scope: Scope, context: ServerContext) -> Principal:
    """Ask the plugins, the configured keys last; or the keys alone, since calling a hook takes longer."""
    headers = Headers(scope=scope)
    if not context.asks_plugins:
        return context.api_keys.principal(credential_of(headers))
    named = {name.lower(): value for name, value in headers.items()}
    principal = context.plugins.authenticate(named, scope.get("method", ""))
    if principal is None:
        msg = "no plugin recognises the sender of this request; pass an API key"
        raise AuthenticationError(msg)
    return principal


async def caller_of(request: Request, context: Context) -> Principal:
    if _CALLER in request.scope:
        return identified(request.scope, context)
    return await run_in_threadpool(identified, request.scope, context)


Caller = Annotated[Principal, Depends(caller_of)]


async def actor_of(request: Request, caller: Caller, context: Context) -> dict[str, str]:
    """Return who the caller is, for the audit log: the name, and the API key's id or the account of the login."""
    key_id = context.api_keys.id_used(caller, request.headers)
    account = {} if caller.login is None else {"account": caller.login.account}
    return {"actor": caller.name or caller.tenant, **({} if key_id is None else {"key_id": key_id}), **account}


Actor = Annotated[dict[str, str], Depends(actor_of)]

_OPERATOR: Final = Principal(tenant="(operator)", name="operator", admin=True)


async def viewer_of(request: Request, context: Context) -> Principal:
    """As `caller_of`, for reading only: a caller without a key is the operator of a server without keys."""
    if not credential_of(request.headers) and context.is_operator(None):
        return _OPERATOR
    return await caller_of(request, context)


Viewer = Annotated[Principal, Depends(viewer_of)]


AccessScope = Literal["owned", "accessible"]


def visible_tenant(caller: Principal, scope: AccessScope) -> str | None:
    """Return the tenant whose objects a listing shows, or None for all (an administrator asked for "accessible")."""
    return None if caller.admin and scope == "accessible" else caller.tenant


def _owned(record: Owned, caller: Principal, what: str, name: str) -> Owned:
    """Return the record if it is the caller's. Raises NotFoundError otherwise."""
    if record.tenant == caller.tenant:
        return record
    raise NotFoundError(no_such(what, name))


def _readable(record: Owned, caller: Principal, what: str, name: str) -> Owned:
    """Return the record if the caller may read it. Raises NotFoundError otherwise."""
    return record if caller.admin else _owned(record, caller, what, name)


def _others(caller: Principal) -> Callable[[Owned], bool]:
    return lambda record: record.tenant != caller.tenant


def _unreadable(caller: Principal) -> Callable[[Owned], bool]:
    return lambda record: record.tenant != caller.tenant and not caller.admin


async def own_session(context: Context, caller: Principal, session_id: str) -> SessionRecord:
    return _owned(await context.store.get_session(session_id), caller, "session", session_id)


async def own_known_session(context: Context, caller: Principal, session_id: str) -> KnownOwner:
    return _owned(await context.sessions.get(session_id, _others(caller)), caller, "session", session_id)


async def readable_session(context: Context, caller: Principal, session_id: str) -> SessionRecord:
    return _readable(await context.store.get_session(session_id), caller, "session", session_id)


async def own_run(context: Context, caller: Principal, model_id: str) -> RunRecord:
    return _owned(await context.store.get_run(model_id), caller, "model", model_id)


async def own_known_run(context: Context, caller: Principal, model_id: str) -> KnownRun:
    return _owned(await context.runs.get(model_id, _others(caller)), caller, "model", model_id)


async def readable_run(context: Context, caller: Principal, model_id: str) -> RunRecord:
    return _readable(await context.store.get_run(model_id), caller, "model", model_id)


class Shown(NamedTuple):
    """What a request shows beside a key, unchecked."""

    reader: RunReader
    credential: str


def credential_shown(request: Request, context: Context) -> Shown | None:
    headers = {name.lower(): value for name, value in request.headers.items()}
    shown = ((reader, reader.shown(headers)) for reader in context.run_readers)
    return next((Shown(reader, credential) for reader, credential in shown if credential is not None), None)


async def run_to_show(request: Request, context: Context, model_id: str) -> RunRecord:
    """Return a run whose curves the sender may read: by what the request shows (`RoutesContext.run_readers`), or a key.

    Raises NotFoundError for a run that this does not open.
    """
    if (shown := credential_shown(request, context)) is None:
        return await readable_run(context, await viewer_of(request, context), model_id)
    if not await shown.reader.opens(shown.credential, model_id):
        raise NotFoundError(f"{no_such('model', model_id)}, or the link to it has expired or was revoked")
    return await context.store.get_run(model_id)


async def usable_sampler(context: Context, caller: Principal, sampler_id: str) -> SamplingSessionRecord:
    """Return one of the caller's. Raises RevokedError if the checkpoint that it rests on may no longer be used."""
    sampler = _owned(await context.samplers.get(sampler_id, _others(caller)), caller, "sampling session", sampler_id)
    checkpoint = await usable_checkpoint(context.store, sampler, context.now())
    if checkpoint is not None and not may_read(checkpoint, caller):
        raise revoked(sampler, "is not published, and your key may no longer read it")
    return sampler


async def readable_sampler(context: Context, caller: Principal, sampler_id: str) -> SamplingSessionRecord:
    return _readable(await context.store.get_sampling_session(sampler_id), caller, "sampling session", sampler_id)


async def polled_sampler(context: Context, caller: Principal, sampler_id: str) -> SamplingSessionRecord:
    """As `readable_sampler`, from memory if it is known."""
    return _readable(
        await context.samplers.get(sampler_id, _unreadable(caller)), caller, "sampling session", sampler_id
    )


async def own_operation(context: Context, caller: Principal, request_id: str) -> OperationRecord:
    return _owned(await context.store.get_operation(request_id), caller, "request", request_id)


async def expect_readable_operation(context: Context, caller: Principal, request_id: str) -> None:
    _readable(await context.requests.get(request_id, _unreadable(caller)), caller, "request", request_id)


async def own_checkpoint(context: Context, caller: Principal, path: str) -> CheckpointRecord:
    return _owned(await live_checkpoint(context, path), caller, "checkpoint", path)


async def own_deleted_checkpoint(context: Context, caller: Principal, path: str) -> CheckpointRecord:
    return _owned(await context.store.deleted_checkpoint(path), caller, "checkpoint", path)


async def readable_checkpoint(
    context: Context, caller: Principal, path: str, *, base_model: str | None = None
) -> CheckpointRecord:
    """Return the checkpoint if it is public or readable by the caller. Raises UserError if it is of another model."""
    record = await live_checkpoint(context, path)
    found = record if record.public else _readable(record, caller, "checkpoint", path)
    if base_model not in {None, found.base_model}:
        msg = f"base_model {base_model!r} does not match {path!r}, a checkpoint of {found.base_model!r}"
        raise UserError(msg)
    return found


async def refuse_export(context: Context, record: CheckpointRecord) -> None:
    """Raises UserError for an export: of what lies under `external_weights`, only uploads can be loaded or sampled."""
    if record.kind == "external" and not await asyncio.to_thread(
        checkpoints.has_manifest, context.checkpoint_root, record.directory
    ):
        msg = (
            f"{record.path!r} is an export, for use elsewhere; pass a path that save_weights_for_sampler (to sample) "
            "or save_state (to load) returned"
        )
        raise UserError(msg)


def may_read(record: CheckpointRecord, caller: Principal) -> bool:
    return record.public or caller.admin or record.tenant == caller.tenant


def read_right(record: CheckpointRecord, caller: Principal) -> ReadRight:
    """Return by which right the caller may read a checkpoint, for an operation that will read it later."""
    if record.tenant == caller.tenant:
        return ReadRight()
    return ReadRight(created_at=record.created_at, only_while_public=not caller.admin)


async def live_checkpoint(context: Context, path: str) -> CheckpointRecord:
    """Raises NotFoundError for an expired checkpoint, even if its files have not been removed yet."""
    record = await context.store.get_checkpoint(path)
    if record.expires_at is not None and record.expires_at <= context.now():
        raise NotFoundError(no_such("checkpoint", path))
    return record
