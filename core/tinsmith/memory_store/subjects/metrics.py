"""The curves of runs: what their operations measured, and what clients logged."""

from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime

from tinsmith.memory_store.memory import Memory
from tinsmith.memory_store.rows import Run
from tinsmith.store import OF_CLIENT, Measured, MetricsRow
from tinsmith.store.metrics import encode_values, merged, row_bytes
from tinsmith.store.wakeups import metrics_topic


def keep(memory: Memory, run: Run, seq_id: int, measured: Measured) -> None:
    """Keep a row of metrics, in place of the one with its step and seq_id."""
    row = MetricsRow(step=measured.step, seq_id=seq_id, time=datetime.now(UTC), values=dict(measured.values))
    run.metrics[row.step, row.seq_id] = row
    more = row_bytes(run.record.model_id, encode_values(row.values))
    run.change(metric_bytes=run.record.metric_bytes + more)
    memory.told.append(metrics_topic(run.record.model_id))


def log(memory: Memory, model_id: str, points: Sequence[Measured]) -> int:
    run, changed = memory.run(model_id), dict[int, Measured]()
    for point in points:
        known = changed.get(point.step) or run.metrics.get((point.step, OF_CLIENT))
        values = merged(known.values if known is not None else {}, point)
        if known is None or values != known.values:
            changed[point.step] = replace(point, values=values)
    for point in changed.values():
        keep(memory, run, OF_CLIENT, point)
    return run.record.metric_bytes


def read(
    memory: Memory, model_id: str, *, from_step: int = 0, after: int | None = None, limit: int
) -> list[MetricsRow]:
    run, first = memory.runs.get(model_id), (from_step, OF_CLIENT - 1 if after is None else after)
    rows = sorted(run.metrics.items()) if run is not None else []
    return [row for key, row in rows if key > first][:limit]


def written(memory: Memory, model_id: str) -> int:
    """Return how many bytes of metrics a run has written. It grows with each change."""
    return memory.run(model_id).record.metric_bytes
