"""Where the wall time of a run went: by iteration and phase, and as a trace.

An operation is in one phase at a time: it waits, its backend runs it, its result is recorded. At each moment of a run,
the first phase of `PHASES` counts in which any of its operations is. In between the client computes.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from itertools import pairwise
from typing import Any, Final, NamedTuple

from tinsmith.protocol import wire
from tinsmith.store import OperationState, TimedOperation

PASSES, STEP, SCORING, DECODE, PREFILL = "passes", "step", "scoring", "decode", "prefill"
SAMPLING, WEIGHT_SYNC, CHECKPOINTS, MODEL = "sampling", "weight_sync", "checkpoints", "model"
RECORDING, BATCH, SAMPLER, QUEUE, PLACE = "recording", "wait_batch", "wait_sampler", "wait_queue", "wait_place"
UNKNOWN, CLIENT = "unknown", "client"

PHASES: Final = {
    PASSES: "forward_backward runs",
    STEP: "optim_step runs",
    SCORING: "forward runs",
    DECODE: "a sampler draws tokens after the first",
    PREFILL: "a sampler reads a prompt, until the first token",
    SAMPLING: "a sampler that does not tell its first token works",
    WEIGHT_SYNC: "weights go to the sampler: save_weights_for_sampler runs",
    CHECKPOINTS: "a state is saved, loaded or exported",
    MODEL: "a model is created or unloaded",
    RECORDING: "results are recorded",
    BATCH: "an engine has taken a training operation, and other batches run before it",
    SAMPLER: "an engine has taken a sample, which waits for a slot of the sampler or for its snapshot",
    QUEUE: "operations wait until an engine takes them",
    PLACE: "operations wait for a place on the backend, or for a lower seq_id",
    UNKNOWN: "an engine has taken operations and has not told yet what became of them, or was interrupted",
    CLIENT: "nothing of the run is on the server",
}
"""The phases, the one that counts first."""

_RUNS: Final = {
    "forward_backward": PASSES,
    "optim_step": STEP,
    "forward": SCORING,
    "save_for_sampler": WEIGHT_SYNC,
    "save_state": CHECKPOINTS,
    "load_state": CHECKPOINTS,
    "export_adapter": CHECKPOINTS,
    "create_model": MODEL,
    "unload_model": MODEL,
}
_MICROSECONDS: Final = 1_000_000


class Span(NamedTuple):
    phase: str
    start: datetime
    end: datetime


@dataclass(frozen=True, slots=True)
class Iteration:
    """What led to an optimizer step: from the end of the step before to its own."""

    seq_id: int  # of the step
    start: datetime
    end: datetime
    spans: Sequence[Span]  # without gaps

    @property
    def seconds(self) -> Mapping[str, float]:
        return _seconds(self.spans)


def spans_of(operation: TimedOperation, now: datetime) -> list[Span]:
    """Return the phases of an operation in order, without empty ones."""
    end = operation.finished_at or now
    waiting = PLACE if operation.early else QUEUE
    marks = [(waiting, operation.created_at), *_after_claim(operation), ("", end)]
    spans, latest = [], operation.created_at
    for (phase, _), (_, until) in pairwise(marks):  # clocks of several machines may disagree
        start, latest = latest, min(max(latest, until), end)
        if latest > start:
            spans.append(Span(phase, start, latest))
    return spans


def _after_claim(operation: TimedOperation) -> Iterator[tuple[str, datetime]]:
    """Yield each phase with its start."""
    if operation.started_at is None:
        return
    if operation.ran_at is None or operation.run_s is None:
        yield UNKNOWN, operation.started_at
        return
    yield BATCH if operation.ordered else SAMPLER, operation.started_at
    first_token_s = operation.first_token_s
    if operation.ordered:
        yield _RUNS.get(operation.kind, UNKNOWN), operation.ran_at
    elif first_token_s is None:
        yield SAMPLING, operation.ran_at
    else:
        yield PREFILL, operation.ran_at
        yield DECODE, operation.ran_at + timedelta(seconds=first_token_s)
    yield RECORDING, operation.ran_at + timedelta(seconds=operation.run_s)


def timeline(operations: Iterable[TimedOperation], start: datetime, end: datetime) -> list[Span]:
    """Divide the time between two moments among the phases, without gaps."""
    changes: list[tuple[datetime, str, int]] = []
    for operation in operations:
        for phase, since, until in spans_of(operation, end):
            if until > start and since < end:
                changes += [(max(since, start), phase, 1), (min(until, end), phase, -1)]
    changes.sort(key=lambda each: each[0])
    active, spans, at = Counter[str](), list[Span](), start
    for moment, phase, change in [*changes, (end, CLIENT, 0)]:
        if moment > at:
            _extend(spans, next((each for each in PHASES if active[each]), CLIENT), at, moment)
            at = moment
        active[phase] += change
    return spans


def _extend(spans: list[Span], phase: str, start: datetime, end: datetime) -> None:
    if spans and spans[-1].phase == phase:
        start = spans.pop().start
    spans.append(Span(phase, start, end))


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


def _seconds(spans: Iterable[Span]) -> dict[str, float]:
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


def _slice(span: Span, process: int) -> dict[str, Any]:
    took = _us(span.end) - _us(span.start)
    return {"ph": "X", "pid": process, "tid": 0, "name": span.phase, "cat": "run", "ts": _us(span.start), "dur": took}


def _nested(operation: TimedOperation, process: int, now: datetime) -> Iterator[dict[str, Any]]:
    """Yield an operation, and its phases inside it."""
    spans = spans_of(operation, now)
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
