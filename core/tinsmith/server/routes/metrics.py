"""Runs and their curves, as the page and programs read them, and the metrics that clients add."""

from functools import partial
from typing import Annotated, Final

from fastapi import APIRouter, Query, Request
from fastapi.responses import Response, StreamingResponse

from tinsmith.errors import UserError
from tinsmith.protocol import wire
from tinsmith.server.auth import (
    AccessScope,
    Caller,
    Viewer,
    credential_shown,
    own_run,
    readable_run,
    run_to_show,
    viewer_of,
    visible_tenant,
)
from tinsmith.server.context import API_PREFIX, Context
from tinsmith.server.json_routes import JsonRoute
from tinsmith.server.lineage import lineage_of
from tinsmith.server.routes.downloads import WhileSending
from tinsmith.server.routes.sessions import Limit, Offset
from tinsmith.server.run_report import report
from tinsmith.server.run_views import joined, list_summaries, read_measured, series_of, summary_of
from tinsmith.store import Measured, MetricsRow
from tinsmith.store.metrics import MOST_NAMES

router = APIRouter(prefix=API_PREFIX, tags=["metrics"], route_class=JsonRoute)

MOST_BYTES: Final = 64 << 20
"""The metrics of one run, beyond which its client can log no more. What operations measure is always kept."""

_MOST_OPERATIONS: Final = 200  # of one answer: each of their results is read whole
_MOST_RUNS: Final = 16  # of one stream


@router.get("/runs", response_model_exclude_none=True)
async def list_runs(
    caller: Viewer,
    context: Context,
    limit: Limit = 100,
    offset: Offset = 0,
    access_scope: AccessScope = "accessible",
) -> wire.RunSummaries:
    """List runs, newest first: the caller's, or all tenants' for an administrator.

    This and the other routes that the page reads need no key on a server without keys: they show all runs then.
    """
    tenant, operator = visible_tenant(caller, access_scope), context.is_operator(caller)
    waits = await context.waits.get()
    return await list_summaries(context.store, tenant, waits, limit=limit, offset=offset, operator=operator)


@router.get("/runs/{model_id}", response_model_exclude_none=True)
async def get_run(model_id: str, caller: Viewer, context: Context) -> wire.RunSummary:
    """Return a run as it is in the list of runs."""
    run = await readable_run(context, caller, model_id)
    return await summary_of(context.store, run, await context.waits.get(), operator=context.is_operator(caller))


@router.post("/runs/{model_id}/metrics")
async def log_metrics(model_id: str, body: wire.LogMetricsRequest, caller: Caller, context: Context) -> dict[str, int]:
    """Add metrics of the client to steps of its run. A value replaces the one that the client logged before."""
    run = await own_run(context, caller, model_id)
    if run.metric_bytes > MOST_BYTES:
        msg = f"run {model_id!r} has {run.metric_bytes} bytes of metrics; a client can log no more beyond {MOST_BYTES}"
        raise UserError(msg)
    points = [_measured(point) for point in body.points]
    await context.quotas.disk.admit(caller.tenant, sum(64 + 16 * len(point.values) for point in points))
    await context.store.log_metrics(model_id, points)
    return {"points": len(points)}


def _measured(point: wire.LoggedPoint) -> Measured:
    """A null stands for a value that is not finite."""
    values = {name: float("nan") if value is None else value for name, value in point.values.items()}
    return Measured(step=point.step, values=values)


@router.get("/runs/{model_id}/metrics", response_model=wire.RunCurves)
async def get_metrics(
    model_id: str,
    request: Request,
    context: Context,
    max_points: Annotated[int, Query(ge=2, le=10_000)] = 1000,
    name: Annotated[list[str] | None, Query(max_length=MOST_NAMES)] = None,
    from_step: Annotated[int, Query(ge=0, lt=2**31)] = 0,
    num_steps: Annotated[int | None, Query(ge=1)] = None,
) -> Response:
    """Return the curves of a run: of every metric, or of those named. A longer series keeps its extremes.

    `from_step` and `num_steps` choose steps: a series of no more steps than `max_points` comes whole.
    """
    run = await run_to_show(request, context, model_id)
    names = None if name is None else frozenset(name)

    read = partial(read_measured, context.store, model_id, from_step, num_steps)

    def to_answer(rows: list[MetricsRow]) -> wire.RunCurves:
        series = series_of(joined(rows)[:num_steps], max_points=max_points, names=names)
        return wire.RunCurves(run_id=model_id, steps=run.steps, series=series)

    return await context.large_answers.build(run.tenant, read, to_answer)


@router.get("/runs/{model_id}/log", response_model=wire.RunReport, response_model_exclude_none=True)
async def get_log(
    model_id: str,
    caller: Viewer,
    context: Context,
    from_seq_id: Annotated[int | None, Query(ge=0, lt=2**63)] = None,
    limit: Annotated[int, Query(ge=1, le=_MOST_OPERATIONS)] = 50,
) -> Response:
    """Return a run and the operations in its log, from a seq_id on, by default the last ones."""
    run = await readable_run(context, caller, model_id)
    read = partial(
        report,
        context.store,
        model_id,
        visible_tenant(caller, "accessible"),
        await context.waits.get(),
        from_seq_id=from_seq_id,
        limit=limit,
        operator=context.is_operator(caller),
    )
    return await context.large_answers.build(run.tenant, read, lambda found: found)


@router.get("/runs/{model_id}/lineage", response_model_exclude_none=True)
async def get_lineage(model_id: str, caller: Viewer, context: Context) -> wire.Lineage:
    """Return the checkpoints of a run, the runs whose weights it took, and those that took its own."""
    run = await readable_run(context, caller, model_id)
    return await lineage_of(context.store, run, visible_tenant(caller, "accessible"))


@router.get("/run_events", response_class=StreamingResponse)
async def run_events(
    request: Request,
    context: Context,
    sending: WhileSending,
    run: Annotated[list[str], Query(min_length=1, max_length=_MOST_RUNS)],
) -> StreamingResponse:
    """Stream the newest steps of runs as they come, as server-sent events, for a minute: then ask again.

    Each event is `{"run_id", "points": [{"step", "time", "values"}]}`. The first ones repeat what is there.
    """
    counts, model_ids = context.open_streams, list(dict.fromkeys(run))
    if (shown := credential_shown(request, context)) is not None:
        sending.enter_context(counts.of_link(shown.credential, model_ids))
    else:
        caller = await viewer_of(request, context)
        sending.enter_context(counts.of_tenant(caller.tenant, len(model_ids)))
    runs = [await run_to_show(request, context, model_id) for model_id in model_ids]
    if shown is not None:
        for tenant in {each.tenant for each in runs}:
            sending.enter_context(counts.of_links_to(tenant))
    events = context.run_streams.events(runs)
    return StreamingResponse(events, media_type="text/event-stream", headers={"Cache-Control": "no-store"})
