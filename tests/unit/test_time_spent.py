"""The phases of operations, and what counts if several operations are in different ones."""

from datetime import datetime, timedelta
from typing import Any

import pytest

from tinsmith.phases import Phase, phases_of
from tinsmith.server.time_spent import iterations_of, time_spent, timeline
from tinsmith.store import OperationState, TimedOperation
from tinsmith.testing.store_records import NOW

RUN = "s1:train:0"


def at(seconds: float) -> datetime:
    return NOW + timedelta(seconds=seconds)


def operation(kind: str, *times: float | None, seq_id: int = 1, **more: Any) -> TimedOperation:
    """Arrived, claimed, ran, for how long, finished: in seconds; None for what has not come."""
    arrived, claimed, ran, run_s, finished = times
    assert arrived is not None
    values: dict[str, Any] = {
        "request_id": f"{kind}-{arrived}",
        "subject_id": "s1:sample:0" if kind == "sample" else RUN,
        "seq_id": seq_id,
        "ordered": kind != "sample",
        "kind": kind,
        "state": OperationState.SUCCEEDED if finished is not None else OperationState.RUNNING,
        "early": False,
        "num_tokens": 3,
        "created_at": at(arrived),
        "started_at": None if claimed is None else at(claimed),
        "ran_at": None if ran is None else at(ran),
        "run_s": run_s,
        "first_token_s": None,
        "finished_at": None if finished is None else at(finished),
        **more,
    }
    return TimedOperation(**values)


def told(spans: list[Phase]) -> list[tuple[str, float, float]]:
    return [(phase, (start - NOW).total_seconds(), (end - NOW).total_seconds()) for phase, start, end in spans]


@pytest.mark.parametrize(
    ("kind", "phase"),
    [
        ("forward_backward", "passes"),
        ("optim_step", "step"),
        ("forward", "scoring"),
        ("save_for_sampler", "weight_sync"),
        ("save_state", "checkpoints"),
        ("create_model", "model"),
    ],
)
def test_the_phases_of_a_training_operation(kind: str, phase: str) -> None:
    assert told(phases_of(operation(kind, 0, 1, 3, 2, 6), at(9))) == [
        ("wait_queue", 0, 1),
        ("wait_batch", 1, 3),
        (phase, 3, 5),
        ("recording", 5, 6),
    ]


def test_the_phases_of_a_sample() -> None:
    whole = operation("sample", 0, 1, 2, 4, 7, first_token_s=1.5)
    assert told(phases_of(whole, at(9)))[1:] == [
        ("wait_sampler", 1, 2),
        ("prefill", 2, 3.5),
        ("decode", 3.5, 6),
        ("recording", 6, 7),
    ]
    untold = operation("sample", 0, 1, 2, 4, 7)
    assert told(phases_of(untold, at(9)))[2] == ("sampling", 2, 6)


def test_the_phases_of_what_has_not_finished() -> None:
    assert told(phases_of(operation("optim_step", 0, None, None, None, None), at(4))) == [("wait_queue", 0, 4)]
    early = operation("optim_step", 0, None, None, None, None, early=True)
    assert told(phases_of(early, at(4))) == [("wait_place", 0, 4)]
    assert told(phases_of(operation("optim_step", 0, 1, None, None, None), at(4))) == [
        ("wait_queue", 0, 1),
        ("unknown", 1, 4),
    ]


def test_clocks_that_disagree_make_no_negative_times() -> None:
    ahead = operation("forward_backward", 5, 4, 3, 9, 10)  # claimed before it arrived, by the engine's clock
    assert told(phases_of(ahead, at(20))) == [("passes", 5, 10)]


def test_the_deepest_phase_counts_and_gaps_are_the_clients() -> None:
    sample = operation("sample", 0, 0, 0, 4, 4, first_token_s=1)
    passes = operation("forward_backward", 3, 3, 5, 1, 6)
    assert told(timeline([sample, passes], at(-1), at(8))) == [
        ("client", -1, 0),
        ("prefill", 0, 1),
        ("decode", 1, 4),
        ("wait_batch", 4, 5),
        ("passes", 5, 6),
        ("client", 6, 8),
    ]


def test_iterations_end_with_steps_and_unknown_time_is_not_attributed() -> None:
    created = operation("create_model", 0, 0, 0, 1, 1, seq_id=0)
    first = operation("optim_step", 1, 1, 1, 1, 2, seq_id=1)
    lost = operation("forward_backward", 2, 2, None, None, 4, seq_id=2)
    second = operation("optim_step", 4, 4, 4, 6, 10, seq_id=3)
    failed = operation("optim_step", 10, 10, 10, 1, 11, seq_id=4, state=OperationState.FAILED)
    both = iterations_of([created, first, lost, second, failed], RUN)
    assert [(each.seq_id, (each.end - each.start).total_seconds()) for each in both] == [(1, 2), (3, 8)]
    found = time_spent(RUN, both, {1: 0, 3: 1})
    assert [(each.step, each.attributed) for each in found.iterations] == [(0, 1.0), (1, 0.75)]
    assert (found.wall_s, found.attributed, found.phases) == (10.0, 0.8, {"step": 7.0, "model": 1.0, "unknown": 2.0})
    assert [each.seq_id for each in iterations_of([first, lost, second], RUN)] == [3], "where the first began is lost"
