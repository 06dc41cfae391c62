"""Where the time of runs went: as JSON, and as traces for Perfetto, which the SDK fetches by links without a key."""

from collections.abc import Mapping
from functools import partial
from typing import Annotated, Final

from fastapi import APIRouter, Query, Request
from fastapi.responses import Response

from tinsmith.errors import AuthenticationError, NotFoundError
from tinsmith.protocol import wire
from tinsmith.server.auth import Viewer, readable_run, readable_session
from tinsmith.server.context import API_PREFIX, Context
from tinsmith.server.json_routes import JsonRoute
from tinsmith.server.routes.downloads import LINK_LIFETIME, base_url, owner_of_key
from tinsmith.server.routes.sessions import runs_of
from tinsmith.server.run_views import read_measured
from tinsmith.server.signed_urls import Grant
from tinsmith.server.time_spent import iterations_of, time_spent, trace_of
from tinsmith.store import OF_CLIENT, TimedOperation
from tinsmith.store.refusals import no_such

router = APIRouter(prefix=API_PREFIX, tags=["time"], route_class=JsonRoute)
open_router = APIRouter(prefix=API_PREFIX, tags=["time"])

_MOST_OPERATIONS: Final = 20_000
"""The newest ones of a run or a session that are looked at."""

_MOST_ITERATIONS: Final = 1000


@router.get("/runs/{model_id}/time", response_model=wire.TimeSpent, response_model_exclude_none=True)
async def get_time(
    model_id: str,
    caller: Viewer,
    context: Context,
    iterations: Annotated[int, Query(ge=1, le=_MOST_ITERATIONS)] = 20,
) -> Response:
    """Return where the wall time of a run's last iterations went, each of which ends with an optimizer step.

    It is of the operations in the log, so iterations older than `server.result_retention_s` may be missing.
    """
    run = await readable_run(context, caller, model_id)

    async def read() -> tuple[list[TimedOperation], Mapping[int, int]]:
        before = run.steps - iterations - 1  # the step with whose end the first of these iterations begins
        rows = await read_measured(context.store, model_id, max(0, before))
        after = min((row.time for row in rows if row.step == before and row.seq_id != OF_CLIENT), default=None)
        found = await context.store.list_times(run.session_id, model_id=model_id, after=after, limit=_MOST_OPERATIONS)
        return found, {row.seq_id: row.step for row in rows}

    def to_answer(found: tuple[list[TimedOperation], Mapping[int, int]]) -> wire.TimeSpent:
        operations, steps = found
        return time_spent(model_id, iterations_of(operations, model_id)[-iterations:], steps)

    return await context.large_answers.build(caller.tenant, read, to_answer)


@router.get("/sessions/{session_id}/trace_export")
async def export_trace(session_id: str, caller: Viewer, context: Context, request: Request) -> wire.TraceExport:
    """Return a link to the trace, which is made when it is fetched."""
    session = await readable_session(context, caller, session_id)
    key_id = context.api_keys.made_with(caller, request.headers)
    grant = Grant(created_at=session.created_at, only_while_public=False, key_id=key_id)
    signed = context.signer.url_path(session_id, context.now() + LINK_LIFETIME, grant)
    return wire.TraceExport(status="ready", url=f"{base_url(context, request)}{API_PREFIX}/traces/{signed}")


@open_router.get("/traces/{stamp}/{grant}/{signature}/{session_id}")
async def get_trace(stamp: int, grant: str, signature: str, session_id: str, context: Context) -> Response:
    """Send a trace. The signature stands for the key."""
    given = context.signer.check(session_id, stamp, grant, signature, context.now())
    owner = await owner_of_key(context, given)
    session = await context.store.get_session(session_id)
    if session.created_at != given.created_at:
        raise NotFoundError(no_such("session", session_id))
    if owner is not None and not owner.admin and owner.tenant != session.tenant:
        msg = "the API key of this download link may no longer read the session"
        raise AuthenticationError(msg)

    async def read() -> tuple[list[TimedOperation], dict[str, list[TimedOperation]]]:
        runs = [run.model_id for run in reversed(await runs_of(context, session))]
        times = partial(context.store.list_times, session_id, limit=_MOST_OPERATIONS)
        return await times(), {model_id: await times(model_id=model_id) for model_id in runs}

    def to_answer(found: tuple[list[TimedOperation], dict[str, list[TimedOperation]]]) -> wire.Trace:
        return trace_of(session_id, *found, now=context.now())

    return await context.large_answers.build(session.tenant, read, to_answer)
