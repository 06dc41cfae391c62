"""Where the wall time of a run went: by iteration and phase, and as a trace.

At each moment of a run, the first phase of `PHASES` counts in which any of its operations is (`phases.py`). In between
the client computes.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import pairwise
from typing import Any, Final

from tinsmith.phases import CLIENT, PHASES, UNKNOWN, Phase, phases_of
from tinsmith.protocol import wire
from tinsmith.store import OperationState, TimedOperation

_MICROSECONDS: Final = 1_000_000


@dataclass(frozen=True, slots=True)
class Iteration:
    """What led to an optimizer step: from the end of the step before to its own."""

    seq_id: int  # of the step
    start: datetime
    end: datetime
    spans: Sequence[Phase]  # without gaps

    @property
    def seconds(self) -> Mapping[str, float]:
        return _seconds(self.spans)


def timeline(operations: Iterable[TimedOperation], start: datetime, end: datetime) -> list[Phase]:
    """Divide the time between two moments among the phases, without gaps."""
    changes: list[tuple[datetime, str, int]] = []
    for operation in operations:
        for phase, since, until in phases_of(operation, end):
            if until > start and since < end:
                changes += [(max(since, start), phase, 1), (min(until, end), phase, -1)]
    changes.sort(key=lambda each: each[0])
    active, spans, at = Counter[str](), list[Phase](), start
    for moment, phase, change in [*changes, (end, CLIENT, 0)]:
        if moment > at:
            _extend(spans, next((each for each in PHASES if active[each]), CLIENT), at, moment)
            at = moment
        active[phase] += change
    return spans


def _extend(spans: list[Phase], phase: str, start: datetime, end: datetime) -> None:
    if spans and spans[-1].phase == phase:
        start = spans.pop().start
    spans.append(Phase(phase, start, end))


def iterations_of(operations: Sequence[TimedOperation], model_id: str) -> list[Iteration]:
    """Return the iterations of a run, in order. The first one of a log that has lost its beginning is left out."""
    own = [each for each in operations if each.subject_id == model_id]
    ended = [
        (each.finished_at, each.seq_id)
        for each in own
        if each.kind == "optim_step" and each.state is OperationState.SUCCEEDED and each.finished_at is not None
    ]
    began = [(each.created_at, -1) for each in own if each.seq_id == 0]
    return [
        Iteration(seq_id, start, end, timeline(operations, start, end))
        for (start, _), (end, seq_id) in pairwise([*began, *sorted(ended)])
        if end > start
    ]


def time_spent(run_id: str, iterations: Sequence[Iteration], steps: Mapping[int, int]) -> wire.TimeSpent:
    """Return what the page and programs read. `steps`: of optimizer steps, by seq_id."""
    total = _seconds(span for each in iterations for span in each.spans)
    return wire.TimeSpent(
        run_id=run_id,
        wall_s=sum(total.values()),
        attributed=_attributed(total),
        phases=total,
        meanings={phase: PHASES[phase] for phase in total},
        iterations=[
            wire.IterationTime(
                seq_id=each.seq_id,
                step=steps.get(each.seq_id),
                began_at=each.start,
                wall_s=(each.end - each.start).total_seconds(),
                attributed=_attributed(each.seconds),
                phases=dict(each.seconds),
            )
            for each in iterations
        ],
    )


def _seconds(spans: Iterable[Phase]) -> dict[str, float]:
    """Return the time in each phase, in the order of PHASES."""
    found: dict[str, float] = dict.fromkeys(PHASES, 0.0)
    for phase, start, end in spans:
        found[phase] += (end - start).total_seconds()
    return {phase: seconds for phase, seconds in found.items() if seconds}


def _attributed(seconds: Mapping[str, float]) -> float:
    """Return the part that is in a known phase."""
    wall_s = sum(seconds.values())
    return 1.0 if not wall_s else 1.0 - seconds.get(UNKNOWN, 0.0) / wall_s


# A trace, in the JSON that Chrome's tracing wrote first and Perfetto reads -------------------------------------------


def trace_of(
    session_id: str,
    operations: Sequence[TimedOperation],
    of_runs: Mapping[str, Sequence[TimedOperation]],
    now: datetime,
) -> wire.Trace:
    """Return the trace of a session: a timeline for each run, and below it each operation with its phases.

    `of_runs`: the operations of each run, and the samples that count for it. Times are in microseconds since 1970.
    """
    events: list[dict[str, Any]] = [_named(0, "process_name", f"session {session_id}")]
    numbers = {model_id: number for number, model_id in enumerate(of_runs, start=1)}
    for model_id, own in of_runs.items():
        events.append(_named(numbers[model_id], "process_name", f"run {model_id}"))
        events.append(_named(numbers[model_id], "thread_name", "phases"))
        spans = timeline(own, own[0].created_at, _end_of(own, now)) if own else []
        events += [_slice(span, numbers[model_id]) for span in spans]
    for each in operations:
        events += _nested(each, numbers.get(each.subject_id, 0), now)
    return wire.Trace(traceEvents=events)


def _end_of(operations: Sequence[TimedOperation], now: datetime) -> datetime:
    return max(each.finished_at or now for each in operations)


def _named(process: int, what: str, name: str) -> dict[str, Any]:
    return {"ph": "M", "pid": process, "tid": 0, "name": what, "args": {"name": name}}


def _slice(span: Phase, process: int) -> dict[str, Any]:
    took = _us(span.end) - _us(span.start)
    return {"ph": "X", "pid": process, "tid": 0, "name": span.phase, "cat": "run", "ts": _us(span.start), "dur": took}


def _nested(operation: TimedOperation, process: int, now: datetime) -> Iterator[dict[str, Any]]:
    """Yield an operation, and its phases inside it."""
    spans = phases_of(operation, now)
    if not spans:
        return
    common = {"pid": process, "tid": 0, "cat": "operation", "id": operation.request_id}
    about = {
        "request_id": operation.request_id,
        "of": operation.subject_id,
        "seq_id": operation.seq_id,
        "state": operation.state.value,
        "tokens": operation.num_tokens,
    }
    yield {"ph": "b", "name": operation.kind, "ts": _us(spans[0].start), "args": about, **common}
    for phase, start, end in spans:
        yield {"ph": "b", "name": phase, "ts": _us(start), **common}
        yield {"ph": "e", "name": phase, "ts": _us(end), **common}
    yield {"ph": "e", "name": operation.kind, "ts": _us(spans[-1].end), **common}


def _us(moment: datetime) -> int:
    return round(moment.timestamp() * _MICROSECONDS)
