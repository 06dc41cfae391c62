"""Searches of sessions and checkpoints, newest first, in pages.

A page may be short although more follow: one request looks at so many records only, whatever it is looking for.
"""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Final, Protocol, TypeVar

from fastapi import APIRouter

from tinsmith.hook_values import Principal
from tinsmith.protocol import wire
from tinsmith.server.auth import Caller, visible_tenant
from tinsmith.server.context import API_PREFIX, Context, ServerContext
from tinsmith.server.json_routes import JsonRoute
from tinsmith.server.routes.runs import described
from tinsmith.store import CheckpointRecord, KeptCheckpoints, Position, SessionRecord
from tinsmith_checkpoints.values import Json

router = APIRouter(prefix=API_PREFIX, tags=["searches"], route_class=JsonRoute)

_PAGE: Final = 500
_MOST_SEARCHED: Final = 5_000

T = TypeVar("T")


@router.post("/sessions/search", response_model_exclude_none=True)
async def search_sessions(
    body: wire.SessionSearchRequest, caller: Caller, context: Context
) -> wire.SessionSearchResult:
    tenant, owners = _whose(caller, body.owner)

    async def choose(page: Sequence[SessionRecord]) -> list[SessionRecord]:
        return [each for each in page if (owners is None or each.tenant in owners) and _matches(body, each)]

    after = None if body.cursor is None else (body.cursor.last_created_at, body.cursor.last_session_id)
    found, end = await _search(context.store.walk_sessions, tenant, choose, _place, after=after, limit=body.limit)
    kept = await context.store.checkpoints_of_sessions([each.session_id for each in found])
    none = KeptCheckpoints(number=0, num_bytes=0)
    return wire.SessionSearchResult(
        sessions=[_summary(each, kept.get(each.session_id, none)) for each in found],
        next_cursor=None if end is None else wire.SessionCursor(last_created_at=end[0], last_session_id=end[1]),
    )


@router.post("/checkpoints/search", response_model_exclude_none=True)
async def search_checkpoints(
    body: wire.CheckpointSearchRequest, caller: Caller, context: Context
) -> wire.CheckpointSearchResult:
    tenant, owners = _whose(caller, body.owner)

    async def choose(page: Sequence[CheckpointRecord]) -> list[CheckpointRecord]:
        chosen = [
            each
            for each in page
            if (owners is None or each.tenant in owners)
            and body.checkpoint_type in {None, each.kind}
            and (body.base_models is None or each.base_model in body.base_models)
            and _has(each.user_metadata, body.user_metadata)
        ]
        if body.project_ids is None:
            return chosen
        projects = await _projects(context, chosen)
        return [each for each in chosen if projects.get(_session_of(each)) in body.project_ids]

    after = None if body.cursor is None else (body.cursor.last_created_at, body.cursor.last_checkpoint_uuid)
    found, end = await _search(
        context.store.walk_checkpoints,
        tenant,
        choose,
        lambda each: (each.created_at, each.path),
        after=after,
        limit=body.limit,
    )
    return wire.CheckpointSearchResult(
        checkpoints=[described(each) for each in found],
        next_cursor=None if end is None else wire.CheckpointCursor(last_created_at=end[0], last_checkpoint_uuid=end[1]),
    )


def _whose(caller: Principal, owner: wire.SearchOwner) -> tuple[str | None, frozenset[str] | None]:
    """Return the tenant whose records are read, None for all, and those that count, None for all that are read.

    Others' names find what names that do not exist find: nothing.
    """
    match owner:
        case wire.OwnSearchOwner():
            return caller.tenant, None
        case wire.AccessibleSearchOwner():
            return visible_tenant(caller, "accessible"), None
        case wire.UserSearchOwner():
            return visible_tenant(caller, "accessible"), frozenset(owner.owner_urns)


class _Walk(Protocol[T]):
    async def __call__(self, tenant: str | None, *, before: Position | None, limit: int) -> list[T]: ...


async def _search(
    walk: _Walk[T],
    tenant: str | None,
    choose: Callable[[Sequence[T]], Awaitable[list[T]]],
    place: Callable[[T], Position],
    *,
    after: Position | None,
    limit: int,
) -> tuple[list[T], Position | None]:
    """Return what is chosen behind a position, and the position at which the next page goes on; None: at the end."""
    found: list[T] = []
    for _ in range(0, _MOST_SEARCHED, _PAGE):
        page = await walk(tenant, before=after, limit=_PAGE)
        chosen = await choose(page)
        room = limit - len(found)
        found += chosen[:room]
        if len(chosen) >= room:
            return found, place(found[-1])
        if len(page) < _PAGE:
            return found, None
        after = place(page[-1])
    return found, after


# sessions


def _place(session: SessionRecord) -> Position:
    return session.created_at, session.session_id


def _matches(body: wire.SessionSearchRequest, session: SessionRecord) -> bool:
    named = [] if body.session_id is None else [body.session_id == session.session_id]
    if body.display_name is not None:
        name = (session.display_name or "").casefold()
        named.append(all(word in name for word in body.display_name.casefold().split()))
    return (
        (not named or any(named))
        and (body.project_ids is None or session.project_id in body.project_ids)
        and _has(wire.as_text(session.user_metadata) or {}, body.user_metadata)
        and (body.statuses is None or any(_is_in(session, each) for each in body.statuses))
    )


def _has(metadata: Mapping[str, Json], wanted: Mapping[str, str]) -> bool:
    return all(metadata.get(name) == value for name, value in wanted.items())


def _is_in(session: SessionRecord, query: wire.StatusQuery) -> bool:
    """Nobody can cancel a session here, and none fails as a whole."""
    status = _status(session)
    if status is None or status.type != query.type:
        return False
    if not isinstance(query, wire.ClientFinishedStatusQuery) or query.reasons is None:
        return True
    return status.reason is not None and status.reason.type in query.reasons


def _status(session: SessionRecord) -> wire.SessionStatus | None:
    match session.ended:
        case None:
            return wire.SessionStatus(type="active")
        case "expired":
            return None
        case reason:
            how = wire.ClientFinishReason(type=reason)
            return wire.SessionStatus(type="client_finished", reason=how, detail=session.end_detail)


def _summary(session: SessionRecord, kept: KeptCheckpoints) -> wire.SessionSummary:
    return wire.SessionSummary(
        session_id=session.session_id,
        created_at=session.created_at,
        owner=session.tenant,
        project_id=session.project_id or "",
        status=_status(session),
        checkpoints_count=kept.number,
        display_name=session.display_name,
        user_metadata=wire.as_text(session.user_metadata),
        checkpoint_storage_bytes=kept.num_bytes,
    )


# checkpoints


async def _projects(context: ServerContext, checkpoints: Sequence[CheckpointRecord]) -> dict[str, str | None]:
    """Return the project of each session that checkpoints belong to. An import belongs to none."""
    sessions = await context.store.find_sessions({_session_of(each) for each in checkpoints})
    return {name: session.project_id for name, session in sessions.items()}


def _session_of(checkpoint: CheckpointRecord) -> str:
    return checkpoint.model_id.partition(":")[0]
