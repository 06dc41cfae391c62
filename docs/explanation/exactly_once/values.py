"""What a state of the model is made of. Everything is immutable and hashable; a state is one value."""

from dataclasses import dataclass
from typing import NamedTuple

QUEUED, RUNNING, SUCCEEDED, FAILED, CANCELLED = "queued", "running", "succeeded", "failed", "cancelled"
FINISHED = frozenset({SUCCEEDED, FAILED, CANCELLED})

DOWN, RECOVERING, ALONE, READY = "down", "recovering", "alone", "ready"
"""Of an engine. ALONE: it retries what may have killed the one before, one by one."""

COPIED, WRITTEN, REGISTERED = "copied", "written", "registered"
"""Of a recovery point that is being taken."""

TRAIN, POISON, REFUSED, SAMPLE = "t", "p", "r", "s"
"""Kinds. POISON kills the engine that runs it; REFUSED was recorded as failed at once; SAMPLE has no order."""

Content = tuple[int, ...]
"""A training state, as the seq_ids applied to it in turn: two are equal just where the bits of the real ones are."""

RecoveryPoints = tuple[tuple[int, str], ...]
"""Registered (seq_id, directory), newest first."""

GAVE_UP: Content = (-1,)
"""The recorded reason of what was tried too often."""


class Row(NamedTuple):
    """An operation in the store. A row that is not `kept` was pruned: only the invariants still look at it."""

    state: str
    attempts: int = 0
    interruptions: int = 0
    alone: bool = False
    result: Content | None = None
    kept: bool = True


class Subject(NamedTuple):
    """A model (RunRow, its operations, its recovery points), or a sampling session, which uses `rows` alone."""

    rows: tuple[Row | None, ...]  # by seq_id; None has not come
    next_seq_id: int = 0
    applied_seq_id: int = -1
    pruned_seq_id: int = -1
    recovery_points: RecoveryPoints = ()
    files: tuple[tuple[str, int, Content], ...] = ()  # on disk: directory, seq_id, state


class Taking(NamedTuple):
    """A recovery point on its way, and, once registered, which directories its engine has seen registered."""

    stage: str
    seq_id: int
    content: Content
    listed: RecoveryPoints = ()


class Engine(NamedTuple):
    """One process. All of it is gone when it dies.

    `current`: its epoch is the newest. Epochs only grow and are only ever compared with the newest, so that whether
    it is the newest is all there is to know.
    """

    phase: str = DOWN
    current: bool = False
    seen: tuple[tuple[RecoveryPoints, int], ...] = ()  # of each model at its start, with its applied_seq_id
    backend: tuple[Content, ...] = ()  # by model, as far as they are rebuilt
    positions: tuple[int, ...] = ()  # of each, the last operation that ran
    claimed: tuple[tuple[int, int], ...] = ()  # (subject, seq_id) whose turn has not come
    ran: tuple[tuple[int, int, Content], ...] = ()  # and results that are not recorded yet, in order
    taking: tuple[Taking | None, ...] = ()
    looked: tuple[int, int] | None = None  # only where a claim is not atomic
    name: str = ""  # goes into the directory of its recovery points


class Faults(NamedTuple):
    """How many of each may still happen."""

    crashes: int = 0
    takeovers: int = 0  # an engine loses its lease while it lives
    lost_answers: int = 0  # a transaction is committed, but its caller hears of a failure
    damages: int = 0  # of the newest of several recovery points
    stops: int = 0  # orderly


class State(NamedTuple):
    """`interrupted`: the last engine was killed from outside, as far as anybody knows; else it crashed."""

    subjects: tuple[Subject, ...]
    engines: tuple[Engine, ...]
    left: Faults
    interrupted: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """`programs`: of each subject, the kinds of its operations in seq_id order."""

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


def replaced(values: tuple, index: int, value: object) -> tuple:  # type: ignore[type-arg]
    return (*values[:index], value, *values[index + 1 :])
