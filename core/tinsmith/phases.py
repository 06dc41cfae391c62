"""The phases of an operation: it waits, its backend runs it, its result is recorded. It is in one at a time."""

from collections.abc import Iterator
from datetime import datetime, timedelta
from itertools import pairwise
from typing import Final, NamedTuple

from tinsmith.store import TimedOperation

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


class Phase(NamedTuple):
    """A time in which an operation, or a run, was in one phase."""

    phase: str
    start: datetime
    end: datetime


def phases_of(operation: TimedOperation, now: datetime) -> list[Phase]:
    """Return the phases of an operation in order, without empty ones."""
    end = operation.finished_at or now
    waiting = PLACE if operation.early else QUEUE
    marks = [(waiting, operation.created_at), *_after_claim(operation), ("", end)]
    spans, latest = [], operation.created_at
    for (phase, _), (_, until) in pairwise(marks):  # clocks of several machines may disagree
        start, latest = latest, min(max(latest, until), end)
        if latest > start:
            spans.append(Phase(phase, start, latest))
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
