"""Sessions, one per client process. They own models and samplers, and heartbeats keep them alive until they end."""

import logging
import secrets
from collections.abc import Mapping
from typing import Annotated

from fastapi import APIRouter, Header, Query, Request, Response

from tinsmith.errors import ServerError, StoreFullError, UserError
from tinsmith.hook_values import Principal
from tinsmith.log_fields import about
from tinsmith.protocol import bounds, wire
from tinsmith.server.auth import (
    AccessScope,
    Actor,
    Caller,
    own_known_session,
    own_session,
    readable_session,
    visible_tenant,
)
from tinsmith.server.context import API_PREFIX, Context, ServerContext
from tinsmith.server.json_routes import DirectRoute, JsonRoute
from tinsmith.server.waiting_reasons import session_messages
from tinsmith.store import RunRecord, SessionRecord
from tinsmith.store.refusals import described_bytes

router = APIRouter(prefix=API_PREFIX, tags=["sessions"], route_class=JsonRoute)

_PAGE = 500
_log = logging.getLogger(__name__)
Limit = Annotated[int, Query(ge=1, le=1000)]
Offset = Annotated[int, Query(ge=0, lt=2**31)]


class SessionEndedError(ServerError):
    """A heartbeat came for a session that has ended. On a 410 the SDK stops sending them."""

    http_status = 410


@router.post("/create_session", response_model_exclude_none=True)
async def create_session(
    body: wire.CreateSessionRequest,
    caller: Caller,
    actor: Actor,
    context: Context,
    x_idempotency_key: Annotated[str | None, Header(max_length=bounds.MAX_NAME_CHARS)] = None,
) -> wire.SessionCreated:
    session = await open_session(context, caller, body, idempotency_key=x_idempotency_key, by=actor)
    warning, error = session_messages(
        [model.name for model in context.settings.models],
        await context.engines.records(),
        operator=context.is_operator(caller),
    )
    if context.stand_in is not None:
        warning = " ".join(filter(None, (f"On this server, {context.stand_in}.", warning)))
    return wire.SessionCreated(session_id=session.session_id, warning_message=warning, error_message=error)


async def session_heartbeat(
    request: Request, body: wire.SessionRequest, caller: Caller, context: Context
) -> wire.SessionHeartbeat:
    del request
    session = await hear(context, body.session_id, caller)
    if session.ended is not None:
        msg = f"session {body.session_id!r} has ended ({session.ended}); create a new one"
        raise SessionEndedError(msg)
    return wire.SessionHeartbeat()


router.add_api_route("/session_heartbeat", session_heartbeat, methods=["POST"], route_class_override=DirectRoute)


@router.post("/sessions/{session_id}/finish")
async def finish_session(
    session_id: str, body: wire.FinishSessionRequest, caller: Caller, actor: Actor, context: Context
) -> dict[str, str]:
    """End a session. If it has ended before, the first reason stays."""
    before = await own_session(context, caller, session_id)
    session = await context.store.end_session(session_id, body.reason.type, body.detail, by=actor)
    if before.ended is None:
        _log.info("session %s ended: %s", session_id, session.ended, extra=about(tenant=caller.tenant))
    context.quotas.disk.freed(caller.tenant)
    return {"session_id": session_id, "ended": session.ended or body.reason.type}


@router.get("/sessions")
async def list_sessions(
    caller: Caller,
    context: Context,
    limit: Limit = 20,
    offset: Offset = 0,
    access_scope: AccessScope = "owned",
) -> wire.SessionList:
    sessions = await context.store.list_sessions(visible_tenant(caller, access_scope), limit=limit, offset=offset)
    return wire.SessionList(sessions=[session.session_id for session in sessions])


@router.get("/sessions/{session_id}", response_model=wire.Session, response_model_exclude_none=True)
async def get_session(
    session_id: str, caller: Caller, context: Context, access_scope: AccessScope = "accessible"
) -> Response:
    find = own_session if access_scope == "owned" else readable_session
    session = await find(context, caller, session_id)

    async def read() -> tuple[list[RunRecord], list[str]]:
        return await runs_of(context, session), await context.store.list_sampling_session_ids(session_id)

    def to_answer(found: tuple[list[RunRecord], list[str]]) -> wire.Session:
        return wire.Session(
            training_run_ids=[run.model_id for run in found[0]],
            sampler_ids=found[1],
            user_metadata=wire.as_text(session.user_metadata),
            display_name=session.display_name,
        )

    return await context.large_answers.build(caller.tenant, read, to_answer)


@router.put("/sessions/{session_id}/project")
async def move_session(
    session_id: str, body: wire.ProjectRequest, caller: Caller, actor: Actor, context: Context
) -> dict[str, str]:
    """Move a session to another project, and its runs and checkpoints with it."""
    await own_session(context, caller, session_id)
    await context.store.update_session(session_id, project_id=body.project_id, by=actor)
    return {"session_id": session_id, "project_id": body.project_id}


async def open_session(
    context: ServerContext,
    caller: Principal,
    body: wire.CreateSessionRequest,
    *,
    idempotency_key: str | None = None,
    by: Mapping[str, str] | None = None,
) -> SessionRecord:
    """Raises CapacityError if the tenant has too many."""
    now = context.now()
    session = SessionRecord(
        session_id=secrets.token_hex(16),
        tenant=caller.tenant,
        created_at=now,
        last_seen_at=now,
        tags=tuple(body.tags),
        user_metadata=body.user_metadata or None,
        sdk_version=body.sdk_version,
        project_id=body.project_id,
        display_name=body.display_name,
        heard_by=context.server_id,
    )
    await context.quotas.admit_session(caller.tenant, described_bytes(*session.described))
    created = await context.store.create_session(session, idempotency_key=idempotency_key, by=by)
    if created.session_id == session.session_id:  # else it is a repeat
        _log.info("session %s began: tenant %s", created.session_id, caller.tenant, extra=about(tenant=caller.tenant))
    return created


async def hear(context: ServerContext, session_id: str, caller: Principal | None = None) -> SessionRecord:
    """Record a sign of life. Raises NotFoundError if the session is not the caller's, if there is one."""
    try:
        with context.hearing.recording():
            if caller is not None:
                await own_known_session(context, caller, session_id)
            return await context.store.hear_session(session_id, context.now(), server_id=context.server_id)
    except StoreFullError:  # silence does not count from now on, so the session lives without a record of this
        return await context.store.get_session(session_id)


def refuse_ended(session: SessionRecord) -> None:
    if session.ended is not None:
        msg = f"session {session.session_id!r} has ended ({session.ended}); create a new one"
        raise UserError(msg)


async def runs_of(context: ServerContext, session: SessionRecord) -> list[RunRecord]:
    """Return all models of a session, newest first."""
    found: list[RunRecord] = []
    while True:
        page, total = await context.store.list_runs(
            session.tenant, session_id=session.session_id, limit=_PAGE, offset=len(found)
        )
        found.extend(page)
        if not page or len(found) >= total:
            return found
