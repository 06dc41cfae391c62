"""The invariants: what must hold in every state, and in every step."""

from exactly_once.steps import Step
from exactly_once.values import (
    FAILED,
    FINISHED,
    GAVE_UP,
    POISON,
    SAMPLE,
    STEP,
    SUCCEEDED,
    Bounds,
    Content,
    State,
    Subject,
    after,
    holds_failed_pass,
    is_finite,
)


def broken_in(state: State, bounds: Bounds) -> str | None:
    """Return the invariant that a state breaks."""
    for number, (subject, program) in enumerate(zip(state.subjects, bounds.programs, strict=True)):
        found = _alone(subject, program, bounds)
        if found is None and program[0] != SAMPLE:
            found = _order(subject, program) or _recovery_points(subject, program) or _recoverable(subject)
        if found is not None:
            return f"subject {number}: {found}"
    return None


def broken_by(before: State, step: Step) -> str | None:
    """Return the invariant that a step breaks: a recorded result never changes."""
    for old, new in zip(before.subjects, step.state.subjects, strict=True):
        if old is new:
            continue
        for seq_id, (was, is_) in enumerate(zip(old.rows, new.rows, strict=True)):
            if was is None or is_ is None or was.state not in FINISHED:
                continue
            if (was.state, was.result) != (is_.state, is_.result):
                return f"the recorded result of seq_id {seq_id} changed from {was.state} to {is_.state}"
    return None


def is_finished(state: State) -> bool:
    """Every operation has its one result. Those up to `pruned_seq_id` may be missing, because they are refused."""
    for subject in state.subjects:
        for seq_id, row in enumerate(subject.rows):
            if row is None:
                if seq_id > subject.pruned_seq_id:
                    return False
            elif row.state not in FINISHED:
                return False
    return True


def _order(subject: Subject, program: str) -> str | None:
    """Exactly once, in order: an operation saw what succeeded before it, each operation once."""
    for seq_id, row in enumerate(subject.rows):
        if row is not None and row.state == SUCCEEDED:
            applied = _truth(subject, program, seq_id)
            if row.result != applied:
                return f"seq_id {seq_id} was applied as {row.result}, the log says {applied}"
        if seq_id <= subject.applied_seq_id and row is not None and row.state not in FINISHED:
            return f"applied_seq_id is {subject.applied_seq_id}, but seq_id {seq_id} is {row.state}"
    return None


def _truth(subject: Subject, program: str, up_to: int) -> Content:
    """Return what the log says of the state.

    A step is discarded if, and only if, its gradient is not finite, or its window holds a failed pass.
    """
    content: Content = ()
    for seq_id, row in enumerate(subject.rows[: up_to + 1]):
        if row is not None and row.state == SUCCEEDED:
            failed = holds_failed_pass(subject, program, seq_id, pruned=True) or not is_finite(content, program)
            content = after(content, program, seq_id, discarded=program[seq_id] == STEP and failed)
    return content


def _recovery_points(subject: Subject, program: str) -> str | None:
    files = {directory: content for directory, _, content in subject.files}
    for seq_id, directory in subject.recovery_points:
        if seq_id > subject.applied_seq_id:
            return f"the recovery point of seq_id {seq_id} is past the recorded results"
        if directory in files and files[directory] != (truth := _truth(subject, program, seq_id)):
            return f"the recovery point of seq_id {seq_id} holds {files[directory]}, not {truth}"
    return None


def _recoverable(subject: Subject) -> str | None:
    files = {directory for directory, _, _ in subject.files}
    start = next((seq_id for seq_id, directory in subject.recovery_points if directory in files), -1)
    if subject.pruned_seq_id > start:
        return f"recovery starts after seq_id {start}, but the log is pruned up to {subject.pruned_seq_id}"
    return None


def _alone(subject: Subject, program: str, bounds: Bounds) -> str | None:
    """An operation is given up only if it is poison, or after `max_interruptions` deaths from outside."""
    for seq_id, row in enumerate(subject.rows):
        if row is None or row.state != FAILED or row.result != GAVE_UP or program[seq_id] == POISON:
            continue
        if row.interruptions < bounds.max_interruptions:
            return f"seq_id {seq_id}, which kills nobody, was given up after {row.interruptions} deaths from outside"
    return None
