"""The engines' states and queues: for the page, and for programs.

A tenant sees the states of all engines, and its own work. An administrator sees all tenants' work.
"""

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Final

from fastapi import APIRouter

from tinsmith.figures import COMMIT_SECONDS
from tinsmith.protocol import wire
from tinsmith.server.auth import Viewer, visible_tenant
from tinsmith.server.context import API_PREFIX, Context
from tinsmith.server.figure_views import hosts_of, times_of, with_figures
from tinsmith.server.json_routes import JsonRoute
from tinsmith.server.waiting_reasons import last_failure, with_causes
from tinsmith.settings.secrets import cleaned
from tinsmith.store import EngineRecord, PendingWork, PlaceCounts

router = APIRouter(prefix=API_PREFIX, tags=["engines"], route_class=JsonRoute)

_STARTING: Final = "starting"


@router.get("/engines", response_model_exclude_none=True)
async def list_engines(caller: Viewer, context: Context) -> wire.EngineList:
    """Tell what each engine does, what waits for it, and whether requests can be recorded."""
    records = await context.engines.records()
    tenant = visible_tenant(caller, "accessible")
    pending = [each for each in await context.backlog.get() if tenant in (None, each.tenant)]
    since = await context.store.running_since()
    trouble = await context.storage.trouble()
    operator = context.is_operator(caller)
    space, figures = await context.quotas.disk.space(), await context.store.list_figures()
    names = [model.name for model in context.settings.models]
    places = {name: await context.store.count_places(name) for name in names}
    engines = [
        _engine(name, records.get(name), pending, since, places[name], operator=operator, now=context.now())
        for name in names
    ]
    for engine in engines:
        engine.text = context.without_text(engine.base_model)
    return wire.EngineList(
        engines=[with_figures(each, figures, operator=operator) for each in engines],
        hosts=hosts_of(figures) if operator else None,
        commits=times_of(context.figures.series(), COMMIT_SECONDS),
        storage=None if trouble is None else cleaned(trouble.to(operator=operator)),
        free_bytes=max(0, space.free_bytes),
        reserve_bytes=await context.quotas.disk.reserve_bytes(),
    )


def _engine(
    name: str,
    record: EngineRecord | None,
    pending: Sequence[PendingWork],
    since: Mapping[str, datetime],
    places: PlaceCounts,
    *,
    operator: bool,
    now: datetime,
) -> wire.EngineView:
    work = [_work(each, now) for each in pending if each.base_model == name]
    if record is None:
        return wire.EngineView(base_model=name, state=_STARTING, restarts=0, models_waiting=places.waiting, work=work)
    before, counts = last_failure(record), record.consistency
    return wire.EngineView(
        base_model=name,
        state=record.state.value,
        detail=with_causes(record.detail, [record], operator=operator) or None,
        progress=record.progress,
        restarts=record.restarts,
        restarted=None if before is None else with_causes(before, [record], operator=operator),
        sampler=None if record.sampler_trouble is None else cleaned(record.sampler_trouble),
        reported_s=_age(record.updated_at, now),
        running_s=_age(since[name], now) if name in since else None,
        turn=None if record.turn is None else record.turn.side,
        turn_awaited=None if record.turn is None else record.turn.waiting,
        saves=None if counts is None else wire.ComparedSaves.model_validate(counts, from_attributes=True),
        last_failure=None if record.failure is None else with_causes(record.failure.text, [record], operator=operator),
        models=places.taken,
        models_waiting=places.waiting,
        max_models=None if record.capabilities is None else record.capabilities.trainer.max_models,
        work=work,
    )


def _work(each: PendingWork, now: datetime) -> wire.PendingView:
    return wire.PendingView(
        tenant=each.tenant,
        kind=each.kind,
        state=each.state.value,
        number=each.number,
        oldest_s=_age(each.oldest_at, now),
    )


def _age(moment: datetime, now: datetime) -> float:
    return max(0.0, (now - moment).total_seconds())  # the engine's clock may be ahead
