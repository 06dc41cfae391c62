"""The store's transactions, each of them one step: the rules of `tinsmith.sql_store`."""

from collections.abc import Iterator
from typing import Literal

from exactly_once.values import (
    CANCELLED,
    FAILED,
    FINISHED,
    GAVE_UP,
    QUEUED,
    REFUSED,
    RUNNING,
    SAMPLE,
    STEP,
    SUCCEEDED,
    Bounds,
    Content,
    Row,
    Subject,
    is_discarded,
    replaced,
)

Ended = Literal["stopped", "crashed", "interrupted"]
"""How an engine ended."""


class Store:
    """Each function returns the subject after a transaction, under a set of mutations."""

    def __init__(self, bounds: Bounds, mutations: frozenset[str]) -> None:
        self._bounds = bounds
        self._mutations = mutations

    # clients

    def submit(self, subject: Subject, kind: str, seq_id: int) -> Subject | None:
        """Return None if nothing changes."""
        row = subject.rows[seq_id]
        if row is not None and row.kept:  # a repeat finds the first row
            if "resubmit_runs_again" in self._mutations and row.state == SUCCEEDED:
                return _with_row(subject, seq_id, Row(QUEUED))
            return None
        if kind != SAMPLE and seq_id <= subject.pruned_seq_id:
            return None  # ResultExpiredError
        if row is not None:
            return None  # a repeat of a pruned sample would be a new operation; not modelled
        hopeless = kind == REFUSED or (kind != SAMPLE and seq_id < subject.next_seq_id)
        return _with_row(subject, seq_id, Row(FAILED, result=()) if hopeless else Row(QUEUED))

    def cancel(self, subject: Subject, seq_id: int) -> Subject | None:
        row = subject.rows[seq_id]
        if row is None or row.state in FINISHED:
            return None
        return _with_row(subject, seq_id, row._replace(state=CANCELLED, result=()))

    # engines

    def claimable(self, subject: Subject, program: str, *, alone: bool) -> Iterator[int]:
        """One at a time: claiming several in one transaction equals claiming them one right after the other."""
        if program[0] == SAMPLE:
            for seq_id, row in enumerate(subject.rows):
                if row is not None and row.state == QUEUED and (row.alone or not alone):
                    yield seq_id
            return
        for seq_id in range(subject.next_seq_id, len(subject.rows)):
            row = subject.rows[seq_id]
            if row is None or not row.kept:
                return
            if row.state == QUEUED:
                if row.alone or not alone:
                    yield seq_id
                return

    def claim(self, subject: Subject, program: str, seq_id: int) -> Subject:
        row = subject.rows[seq_id]
        assert row is not None
        subject = _with_row(subject, seq_id, row._replace(state=RUNNING, attempts=row.attempts + 1))
        return subject if program[0] == SAMPLE else subject._replace(next_seq_id=seq_id + 1)

    def complete(self, subject: Subject, program: str, seq_id: int, result: Content) -> Subject:
        row = subject.rows[seq_id]
        assert row is not None
        if row.state != RUNNING and "complete_twice" not in self._mutations:
            return subject
        row = row._replace(state=SUCCEEDED, result=result)
        if "discards_are_failures" in self._mutations and is_discarded(row, seq_id):
            row = row._replace(state=FAILED)
        subject = _with_row(subject, seq_id, row)
        return subject if program[0] == SAMPLE else _applied(subject, seq_id)

    def requeue(self, subject: Subject, program: str, ended: Ended) -> Subject:
        ordered = program[0] != SAMPLE
        for seq_id, running in enumerate(subject.rows):
            if running is None or running.state != RUNNING:
                continue
            row = self._counted(running, ended)
            if ended != "stopped" and self._too_often(row, ended):
                subject = _with_row(subject, seq_id, row._replace(state=FAILED, result=GAVE_UP))
                subject = _applied(subject, seq_id) if ordered else subject
                continue
            if ended != "stopped" and "requeue_in_company" not in self._mutations:
                row = row._replace(alone=ordered or row.attempts >= self._bounds.max_attempts - 1)
            subject = _with_row(subject, seq_id, row._replace(state=QUEUED))
            if ordered and "requeue_keeps_position" not in self._mutations:
                subject = subject._replace(next_seq_id=min(subject.next_seq_id, seq_id))
        return subject

    def _counted(self, row: Row, ended: Ended) -> Row:
        """Take back the attempt that `claim` counted, unless the engine crashed, and count an interruption."""
        if ended != "crashed" or "requeue_without_attempts" in self._mutations:
            row = row._replace(attempts=row.attempts - 1)
        return row._replace(interruptions=row.interruptions + 1) if ended == "interrupted" else row

    def _too_often(self, row: Row, ended: Ended) -> bool:
        if ended == "interrupted":
            return row.interruptions >= self._bounds.max_interruptions
        return row.attempts >= self._bounds.max_attempts

    def fail_gaps(self, subject: Subject) -> Iterator[Subject]:
        """Yield one outcome for each operation that may be the last one that has waited long enough."""
        rows, first = subject.rows, subject.next_seq_id
        if "gap_closed_while_running" not in self._mutations and any(row and row.state == RUNNING for row in rows):
            return
        missing = first
        while missing < len(rows) and (row := rows[missing]) is not None and row.kept:
            if row.state == QUEUED:
                return
            missing += 1
        behind = [n for n in range(missing, len(rows)) if (row := rows[n]) is not None and row.state == QUEUED]
        for last in behind:
            moved = subject._replace(next_seq_id=last + 1, applied_seq_id=last)
            for seq_id in behind:
                if seq_id <= last:
                    moved = _with_row(moved, seq_id, Row(FAILED, result=()))
            yield moved

    def add_recovery_point(self, subject: Subject, seq_id: int, directory: str) -> Subject | None:
        """Return None if it is refused."""
        if seq_id > subject.applied_seq_id and "point_early" not in self._mutations:
            return None
        others = [each for each in subject.recovery_points if each[0] != seq_id]
        newest = sorted([*others, (seq_id, directory)], reverse=True)[: self._bounds.keep]
        return subject._replace(recovery_points=tuple(newest))

    # housekeeping

    def prune(self, subject: Subject, program: str) -> Iterator[tuple[int, Subject]]:
        """One at a time, in any order: any of them may be old enough."""
        points = [seq_id for seq_id, _ in subject.recovery_points]
        bound = max if "prune_past_oldest" in self._mutations else min
        needed_after = bound(points, default=-1)
        for seq_id, row in enumerate(subject.rows):
            if row is None or row.state not in FINISHED or not row.kept:
                continue
            if program[0] != SAMPLE and (seq_id >= subject.next_seq_id or seq_id > needed_after):
                continue
            if self._is_needed(subject, program, seq_id):
                continue
            pruned = _with_row(subject, seq_id, row._replace(kept=False))
            yield seq_id, pruned._replace(pruned_seq_id=max(pruned.pruned_seq_id, seq_id))

    def _is_needed(self, subject: Subject, program: str, seq_id: int) -> bool:
        """Return whether it is a failed pass, whose window has not ended: recovery points leave it out."""
        row = subject.rows[seq_id]
        if "prune_failed_passes" in self._mutations or program[0] == SAMPLE or row is None or row.state != FAILED:
            return False
        steps = (each for n, each in enumerate(subject.rows) if n > seq_id and program[n] == STEP)
        return (
            program[seq_id] != STEP
            and STEP in program[seq_id:]
            and not any(each and each.state == SUCCEEDED for each in steps)
        )


def _with_row(subject: Subject, seq_id: int, row: Row) -> Subject:
    return subject._replace(rows=replaced(subject.rows, seq_id, row))


def _applied(subject: Subject, seq_id: int) -> Subject:
    return subject._replace(applied_seq_id=max(subject.applied_seq_id, seq_id))
