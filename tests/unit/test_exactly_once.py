"""The model of the operation log in docs/explanation/exactly_once: it holds, and the checker finds every mistake."""

import re
from pathlib import Path

import pytest
from exactly_once.bounds import BOUNDS
from exactly_once.checker import check
from exactly_once.invariants import broken_in
from exactly_once.mutations import MUTATIONS
from exactly_once.values import READY, SUCCEEDED, Bounds, Engine, Faults, Row, State, Subject

SMALL = [name for name in BOUNDS if name.startswith("small:")]

EXPECTED = {
    "complete_unfenced": "was applied as",
    "complete_twice": "changed from cancelled to succeeded",
    "claim_unfenced": "applied_seq_id is 1, but seq_id 0 is running",
    "claim_not_atomic": "changed from succeeded to running",
    "claim_answer_lost": "applied_seq_id is 1, but seq_id 0 is running",
    "requeue_unfenced": r"was applied as \(0, 0\)",
    "requeue_without_attempts": "nothing finishes everything, .*: seq_id 0 of subject 0 is queued",
    "requeue_in_company": "which kills nobody, was given up after 0 deaths",
    "requeue_keeps_position": "applied_seq_id is 1, but seq_id 0 is queued",
    "no_requeue": "applied_seq_id is 1, but seq_id 0 is running",
    "resubmit_runs_again": "changed from succeeded to queued",
    "point_early": "recovery point of seq_id 0 is past the recorded results",
    "point_unfenced": "was applied as",
    "point_shared_names": r"recovery point of seq_id 0 holds \(0,\), not \(\)",
    "tidy_removes_newer": "recovery starts after seq_id -1, but the log is pruned up to 0",
    "prune_past_oldest": "recovery starts after seq_id 0, but the log is pruned up to 1",
    "gap_closed_while_running": "applied_seq_id is 2, but seq_id 0 is running",
    "windows_ignored": r"was applied as \(0, 2, 3\), the log says \(-4,\)",
    "windows_forgotten": r"was applied as \(0, 2\), the log says \(-3,\)",
    "discards_not_replayed": r"recovery point of seq_id 3 holds \(0, 2, 3\), not \(-4,\)",
    "discards_are_failures": r"recovery point of seq_id 1 holds \(-2,\), not \(0,\)",
    "prune_failed_passes": r"was applied as \(0, 2, 3\), the log says \(-4,\)",
    "replay_from_start": r"was applied as \(0, 0, 1\)",
}


@pytest.mark.slow
@pytest.mark.parametrize("name", SMALL)
def test_the_protocol_holds(name: str) -> None:
    found = check(BOUNDS[name])
    assert found.broken is None, "\n".join([found.broken, *found.trace])
    assert found.states > 500


def test_the_page_names_every_bound_and_every_mistake() -> None:
    page = (Path(__file__).parents[2] / "docs" / "explanation" / "exactly-once.md").read_text()
    assert all(f"| `{name}` |" in page for name in SMALL)
    assert all(f"| `{name}` | {what} | `{bounds}` |" in page for name, (what, bounds) in MUTATIONS.items())


@pytest.mark.parametrize("mutation", MUTATIONS)
def test_every_mistake_is_found(mutation: str) -> None:
    _, bounds = MUTATIONS[mutation]
    found = check(BOUNDS[bounds], [mutation])
    assert found.broken is not None
    assert re.search(EXPECTED[mutation], found.broken), found.broken
    assert len(found.trace) > 5
    assert all(re.fullmatch(r"[\w,_: ]+ \((engine|subject) \d.*\)", step) for step in found.trace)


def test_a_counterexample_reads_as_what_happened() -> None:
    found = check(BOUNDS["small:gaps"], ["gap_closed_while_running"])
    assert found.trace[0] == "a client submits (subject 0, seq_id 0)"
    assert found.trace[-2:] == ("claim (engine 0, subject 0, seq_id 0)", "fail_gaps (engine 0, subject 0, seq_id 2)")


def test_a_state_that_applied_an_operation_twice_is_seen() -> None:
    bounds = Bounds(programs=("t",), faults=Faults())
    subject = Subject(rows=(Row(SUCCEEDED, result=(0, 0)),), next_seq_id=1, applied_seq_id=0)
    broken = broken_in(State((subject,), (Engine(phase=READY),), Faults()), bounds)
    assert broken == "subject 0: seq_id 0 was applied as (0, 0), the log says (0,)"
