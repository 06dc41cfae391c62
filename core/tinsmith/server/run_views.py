"""What people and programs read of runs, by the page, the API and `tinsmith runs`: lists of runs, and their curves."""

import math
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from itertools import pairwise
from typing import Final

import numpy as np

from tinsmith.protocol import wire
from tinsmith.server.waits import Waits
from tinsmith.store import OF_CLIENT, MetricsRow, RequestStore, RunRecord, SessionRecord
from tinsmith.store.metrics import ENGINE_S, TOKENS

TOKENS_PER_S: Final = "tokens_per_s"
"""Trained tokens of a step, for each second that its passes and the step took on the device."""

STEP_S: Final = "step_s"
"""Seconds from the optimizer step before to this one: of passes, samples, waiting, and the script's own work."""

_LOSSES: Final = frozenset({"loss:sum", "forward/loss:sum"})
_PAGE: Final = 2000  # rows of one read
_ROWS_OF_STEP: Final = 4  # as many as most steps have, or more

Step = tuple[int, datetime, Mapping[str, float]]


async def list_summaries(
    store: RequestStore, tenant: str | None, waits: Waits, *, limit: int, offset: int, operator: bool = True
) -> wire.RunSummaries:
    """List runs of a tenant, or of all, newest first. `operator`: who may read the causes of failures."""
    runs, total = await store.list_runs(tenant, limit=limit, offset=offset)
    sessions = await store.find_sessions({run.session_id for run in runs})
    found = [(run, sessions.get(run.session_id)) for run in runs]
    return wire.RunSummaries(  # without the runs that were deleted with their session meanwhile
        runs=[
            _summary(run, session, waits.of(run, session, operator=operator))
            for run, session in found
            if session is not None
        ],
        cursor=wire.Cursor(offset=offset, limit=limit, total_count=total),
    )


async def summary_of(store: RequestStore, run: RunRecord, waits: Waits, *, operator: bool) -> wire.RunSummary:
    """Raise NotFoundError if its session is deleted meanwhile."""
    session = await store.get_session(run.session_id)
    return _summary(run, session, waits.of(run, session, operator=operator))


def _summary(run: RunRecord, session: SessionRecord, waits_for: wire.WaitsFor | None) -> wire.RunSummary:
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
        waits_for=waits_for,
    )


async def read_measured(
    store: RequestStore, model_id: str, from_step: int = 0, num_steps: int | None = None
) -> list[MetricsRow]:
    """Return all rows of a run's metrics from a step on, or at least those of so many steps."""
    limit = _PAGE if num_steps is None else min(_PAGE, _ROWS_OF_STEP * (num_steps + 1))
    rows: list[MetricsRow] = []
    page = await store.read_metrics(model_id, from_step=from_step, limit=limit)
    while page:
        rows += page
        last = page[-1]
        if len(page) < limit or (num_steps is not None and len({row.step for row in rows}) > num_steps):
            break
        page = await store.read_metrics(model_id, from_step=last.step, after=last.seq_id, limit=limit)
    return rows


def joined(rows: Iterable[MetricsRow]) -> list[Step]:
    """Join the rows of each step, which come in order. Several passes are reduced as the names of their metrics say."""
    found: dict[int, list[MetricsRow]] = {}
    for row in rows:
        found.setdefault(row.step, []).append(row)
    steps, before = list[Step](), None
    for step, of_step in found.items():
        values, ended = _joined(of_step), step_ended(of_step)
        if before is not None and ended is not None and before[0] == step - 1:
            values.setdefault(STEP_S, (ended - before[1]).total_seconds())
        before = None if ended is None else (step, ended)
        steps.append((step, max(row.time for row in of_step), values))
    return steps


def step_ended(rows: Sequence[MetricsRow]) -> datetime | None:
    """Return when the optimizer step of these rows was made, if it was: every pass has a loss."""
    return max((row.time for row in rows if row.seq_id != OF_CLIENT and not _LOSSES & row.values.keys()), default=None)


def _joined(rows: Sequence[MetricsRow]) -> dict[str, float]:
    """A name that the client has logged is the client's. Most names come once: the others are reduced."""
    values: dict[str, float] = {}
    repeated: dict[str, list[float]] = {}
    for row in rows:
        if row.seq_id != OF_CLIENT:
            for name, value in row.values.items():
                if name in values:
                    repeated.setdefault(name, [values[name]]).append(value)
                else:
                    values[name] = value
    for name, found in repeated.items():
        values[name] = _reduced(name, found)
    if values.get(TOKENS) and values.get(ENGINE_S):
        values[TOKENS_PER_S] = values[TOKENS] / values[ENGINE_S]
    for row in rows:
        if row.seq_id == OF_CLIENT:
            values.update(row.values)
    return values


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
    columns: dict[str, tuple[list[int], list[float]]] = {}  # the steps, by their place in the sequence, and the values
    for at, (_, _, values) in enumerate(steps):
        for name, value in values.items():
            if names is None or name in names:
                column = columns.get(name)
                if column is None:
                    column = columns[name] = [], []
                column[0].append(at)
                column[1].append(value)
    return [_series(name, steps, *column, max_points) for name, column in sorted(columns.items())]


def _series(
    name: str, steps: Sequence[Step], places: Sequence[int], values: Sequence[float], max_points: int
) -> wire.Series:
    kept = thinned(values, max_points)
    points = [steps[places[at]] for at in kept]
    return wire.Series(
        name=name,
        num_points=len(values),
        steps=[step for step, _, _ in points],
        times=[round(time.timestamp(), 3) for _, time, _ in points],
        values=[finite(values[at]) for at in kept],
    )


def finite(value: float) -> float | None:
    """Return a value as JSON has it: NaN and the infinities are null, a gap in the curve."""
    return value if math.isfinite(value) else None


def thinned(values: Sequence[float], most: int) -> list[int]:
    """Return the indices of a limited number of values, the least and the largest of each stretch: no peak is lost."""
    if len(values) <= most:
        return list(range(len(values)))
    kept: set[int] = set()
    array = np.array(values, np.float64)
    counted = np.isfinite(array)
    low, high = np.where(counted, array, np.inf), np.where(counted, array, -np.inf)
    stretches = most // 2
    bounds = np.arange(stretches + 1) * len(array) // stretches
    for first, after in pairwise(bounds.tolist()):
        kept |= {first + int(low[first:after].argmin()), first + int(high[first:after].argmax())}
    return sorted(kept)
