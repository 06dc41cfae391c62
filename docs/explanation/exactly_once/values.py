"""The parts of a state. Everything is immutable and hashable; a state is one value."""

from collections.abc import Collection
from dataclasses import dataclass
from typing import NamedTuple

QUEUED, RUNNING, SUCCEEDED, FAILED, CANCELLED = "queued", "running", "succeeded", "failed", "cancelled"
FINISHED = frozenset({SUCCEEDED, FAILED, CANCELLED})

DOWN, RECOVERING, ALONE, READY = "down", "recovering", "alone", "ready"
"""Phases of an engine. ALONE: it retries, one by one, what may have killed the engine before it."""

COPIED, WRITTEN, REGISTERED = "copied", "written", "registered"
"""Stages of a recovery point that is being taken."""

TRAIN, INFINITE, POISON, REFUSED, STEP, SAMPLE = "t", "n", "p", "r", "o", "s"
"""Kinds of operations. TRAIN is a pass; INFINITE is one whose gradient is not finite, POISON one that kills its engine,
REFUSED one that was recorded as failed at once. STEP is an optimizer step. SAMPLE has no order."""

Content = tuple[int, ...]
"""A training state, as the seq_ids applied to it in order, and ~seq_id for a step that has dropped the pending passes.
Equal tuples stand for equal bits."""

RecoveryPoints = tuple[tuple[int, str], ...]
"""Registered (seq_id, directory), newest first."""

GAVE_UP: Content = (-1,)
"""The recorded result of an operation that was tried too often."""


class Row(NamedTuple):
    """An operation in the store. A row that is not `kept` was pruned; only the invariants still read it."""

    state: str
    attempts: int = 0
    interruptions: int = 0
    alone: bool = False
    result: Content | None = None
    kept: bool = True


class Subject(NamedTuple):
    """A model (its run, its operations, its recovery points), or a sampling session, which uses `rows` alone."""

    rows: tuple[Row | None, ...]  # by seq_id; None has not arrived
    next_seq_id: int = 0
    applied_seq_id: int = -1
    pruned_seq_id: int = -1
    recovery_points: RecoveryPoints = ()
    files: tuple[tuple[str, int, Content], ...] = ()  # on disk: directory, seq_id, state


class Taking(NamedTuple):
    """A recovery point being taken; once it is registered, also the points that its engine has seen registered."""

    stage: str
    seq_id: int
    content: Content
    listed: RecoveryPoints = ()


class Engine(NamedTuple):
    """One process; its whole state is lost when it dies.

    `current`: its epoch is the newest. Epochs only grow and are only compared with the newest, so nothing else
    about them matters.
    """

    phase: str = DOWN
    current: bool = False
    seen: tuple[tuple[RecoveryPoints, int], ...] = ()  # of each model at its start, with its applied_seq_id
    backend: tuple[Content, ...] = ()  # by model, for those rebuilt so far
    positions: tuple[int, ...] = ()  # the last operation that ran, by model
    claimed: tuple[tuple[int, int], ...] = ()  # (subject, seq_id) whose turn has not come
    ran: tuple[tuple[int, int, Content], ...] = ()  # with results that are not recorded yet, in order
    taking: tuple[Taking | None, ...] = ()
    looked: tuple[int, int] | None = None  # only where a claim is not atomic
    started: tuple[int, ...] = ()  # what had run before it, by model; only where it forgets what that was
    name: str = ""  # goes into the directory of its recovery points


class Faults(NamedTuple):
    """How many faults of each kind may still happen."""

    crashes: int = 0
    takeovers: int = 0  # a living engine loses its lease
    lost_answers: int = 0  # a transaction is committed, but its caller gets an error
    damages: int = 0  # of the newest of several recovery points
    stops: int = 0  # orderly


class State(NamedTuple):
    """`interrupted`: as far as known, the last engine was killed from outside; otherwise it crashed."""

    subjects: tuple[Subject, ...]
    engines: tuple[Engine, ...]
    left: Faults
    interrupted: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """`programs`: for each subject, the kinds of its operations in seq_id order."""

    programs: tuple[str, ...]
    faults: Faults
    engines: int = 2
    max_attempts: int = 2  # crashes, after which an operation fails
    max_interruptions: int = 9  # deaths from outside
    keep: int = 0  # recovery points; 0 takes none
    in_order: bool = False  # clients submit in order, so that there are no gaps

    def start(self) -> State:
        subjects = tuple(Subject(rows=(None,) * len(program)) for program in self.programs)
        return State(subjects, (Engine(),) * self.engines, self.faults)


def after(content: Content, program: str, seq_id: int, *, discarded: bool) -> Content:
    """Return the training state after one more operation. A step that is discarded drops the passes before it."""
    if not discarded:
        return (*content, seq_id)
    return (*content[: len(content) - len(pending(content, program))], ~seq_id)


def pending(content: Content, program: str) -> Content:
    """Return the passes since the last step."""
    start = len(content)
    while start and content[start - 1] >= 0 and program[content[start - 1]] != STEP:
        start -= 1
    return content[start:]


def is_finite(content: Content, program: str) -> bool:
    """Return whether a step could be applied: the backend decides by the pending gradient."""
    return all(program[seq_id] != INFINITE for seq_id in pending(content, program))


def is_discarded(row: Row, seq_id: int) -> bool:
    """Return whether the result of a step says that it was discarded."""
    return row.result is not None and row.result[-1:] == (~seq_id,)


def holds_failed_pass(
    subject: Subject, program: str, seq_id: int, *, since: int = -1, ran: Collection[int] = (), pruned: bool = False
) -> bool:
    """Return whether a pass has failed in the window of a step, as the log says; `pruned`: as it once said.

    Of what an engine `ran`, it knows the results before they are recorded.
    """
    for before in range(seq_id - 1, since, -1):
        row = subject.rows[before]
        if row is None or not (row.kept or pruned):
            continue
        if program[before] == STEP and (row.state == SUCCEEDED or before in ran):
            return False
        if program[before] != STEP and row.state == FAILED:
            return True
    return False


def replaced(values: tuple, index: int, value: object) -> tuple:  # type: ignore[type-arg]
    return (*values[:index], value, *values[index + 1 :])
