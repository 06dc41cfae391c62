"""What people and programs read of runs, by the page, the API and `tinsmith runs`: lists of runs, and their curves."""

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from typing import Final

from tinsmith.protocol import wire
from tinsmith.store import MetricsRow, RequestStore, RunRecord, SessionRecord
from tinsmith.store.metrics import ENGINE_S, TOKENS
from tinsmith.store.records import OF_CLIENT

TOKENS_PER_S: Final = "tokens_per_s"
"""Trained tokens of a step, for each second that its passes and the step took on the device."""

STEP_S: Final = "step_s"
"""Seconds from the optimizer step before to this one: of passes, samples, waiting, and the script's own work."""

_LOSSES: Final = frozenset({"loss:sum", "forward/loss:sum"})
_PAGE: Final = 2000  # rows of one read

Step = tuple[int, datetime, Mapping[str, float]]


async def list_summaries(store: RequestStore, tenant: str | None, *, limit: int, offset: int) -> wire.RunSummaries:
    """List runs of a tenant, or of all, newest first."""
    runs, total = await store.list_runs(tenant, limit=limit, offset=offset)
    sessions = await store.find_sessions({run.session_id for run in runs})
    found = [(run, sessions.get(run.session_id)) for run in runs]
    return wire.RunSummaries(  # without the runs that were deleted with their session meanwhile
        runs=[_summary(run, session) for run, session in found if session is not None],
        cursor=wire.Cursor(offset=offset, limit=limit, total_count=total),
    )


def _summary(run: RunRecord, session: SessionRecord) -> wire.RunSummary:
    return wire.RunSummary(
        run_id=run.model_id,
        base_model=run.base_model,
        tenant=run.tenant,
        state=run.state.value,
        state_reason=run.state_reason,
        lora_rank=run.lora.rank,
        steps=run.steps,
        created_at=run.created_at,
        last_request_at=run.last_request_at,
        name=session.display_name,
        project_id=session.project_id,
        tags=list(session.tags),
        user_metadata=wire.as_text(run.user_metadata),
        ended=session.ended,
    )


async def read_measured(store: RequestStore, model_id: str, from_step: int = 0) -> list[MetricsRow]:
    """Return all rows of a run's metrics from a step on."""
    rows: list[MetricsRow] = []
    page = await store.read_metrics(model_id, from_step=from_step, limit=_PAGE)
    while page:
        rows += page
        last = page[-1]
        if len(page) < _PAGE:
            break
        page = await store.read_metrics(model_id, from_step=last.step, after=last.seq_id, limit=_PAGE)
    return rows


def joined(rows: Iterable[MetricsRow]) -> list[Step]:
    """Join the rows of each step, which come in order. Several passes are reduced as the names of their metrics say."""
    found: dict[int, list[MetricsRow]] = {}
    for row in rows:
        found.setdefault(row.step, []).append(row)
    steps, before = list[Step](), None
    for step, of_step in found.items():
        values, ended = _joined(of_step), _ended(of_step)
        if before is not None and ended is not None and before[0] == step - 1:
            values.setdefault(STEP_S, (ended - before[1]).total_seconds())
        before = None if ended is None else (step, ended)
        steps.append((step, max(row.time for row in of_step), values))
    return steps


def _ended(rows: Sequence[MetricsRow]) -> datetime | None:
    """Return when the optimizer step was made, if it was: every pass has a loss."""
    return max((row.time for row in rows if row.seq_id != OF_CLIENT and not _LOSSES & row.values.keys()), default=None)


def _joined(rows: Sequence[MetricsRow]) -> dict[str, float]:
    """A name that the client has logged is the client's."""
    logged = {name: value for row in rows if row.seq_id == OF_CLIENT for name, value in row.values.items()}
    measured: defaultdict[str, list[float]] = defaultdict(list)
    for row in rows:
        if row.seq_id != OF_CLIENT:
            for name, value in row.values.items():
                measured[name].append(value)
    values = {name: _reduced(name, found) for name, found in measured.items()}
    if values.get(TOKENS) and values.get(ENGINE_S):
        values[TOKENS_PER_S] = values[TOKENS] / values[ENGINE_S]
    return values | logged


def _reduced(name: str, values: Sequence[float]) -> float:
    match name.rpartition(":")[2]:
        case "sum":
            return sum(values)
        case "min":
            return min(values)
        case "max":
            return max(values)
        case _:
            return sum(values) / len(values)


def series_of(steps: Sequence[Step], *, max_points: int, names: frozenset[str] | None = None) -> list[wire.Series]:
    """Return a series for each metric, of at most `max_points`. Every point is one that was measured."""
    points: dict[str, list[tuple[int, datetime, float]]] = {}
    for step, time, values in steps:
        for name, value in values.items():
            if names is None or name in names:
                points.setdefault(name, []).append((step, time, value))
    return [_series(name, found, max_points) for name, found in sorted(points.items())]


def _series(name: str, points: Sequence[tuple[int, datetime, float]], max_points: int) -> wire.Series:
    kept = [points[at] for at in thinned([value for _, _, value in points], max_points)]
    return wire.Series(
        name=name,
        num_points=len(points),
        steps=[step for step, _, _ in kept],
        times=[round(time.timestamp(), 3) for _, time, _ in kept],
        values=[finite(value) for _, _, value in kept],
    )


def finite(value: float) -> float | None:
    """Return a value as JSON has it: NaN and the infinities are null, a gap in the curve."""
    return value if math.isfinite(value) else None


def thinned(values: Sequence[float], most: int) -> list[int]:
    """Return the indices of a limited number of values, the least and the largest of each stretch: no peak is lost."""
    if len(values) <= most:
        return list(range(len(values)))
    kept: set[int] = set()
    stretches = most // 2
    for number in range(stretches):
        stretch = range(number * len(values) // stretches, (number + 1) * len(values) // stretches)
        counted = [at for at in stretch if math.isfinite(values[at])] or [stretch.start]
        kept |= {min(counted, key=values.__getitem__), max(counted, key=values.__getitem__)}
    return sorted(kept)
