"""The store's transactions, each one step: `tinsmith.sql_store`, rule by rule."""

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
    SUCCEEDED,
    Bounds,
    Content,
    Row,
    Stream,
    replaced,
)

Ended = Literal["stopped", "crashed", "interrupted"]
"""How an engine did."""


class Store:
    """Functions from one stream to the next, under a set of mutations."""

    def __init__(self, bounds: Bounds, mutations: frozenset[str]) -> None:
        self._bounds = bounds
        self._mutations = mutations

    # clients

    def submit(self, stream: Stream, kind: str, seq_id: int) -> Stream | None:
        """Return None where nothing changes."""
        row = stream.rows[seq_id]
        if row is not None and row.kept:  # a repeat finds the first one
            if "resubmit_runs_again" in self._mutations and row.state == SUCCEEDED:
                return _with_row(stream, seq_id, Row(QUEUED))
            return None
        if kind != SAMPLE and seq_id <= stream.pruned_seq_id:
            return None  # ResultExpiredError
        if row is not None:
            return None  # a sample past its retention would be a new one; not modelled
        hopeless = kind == REFUSED or (kind != SAMPLE and seq_id < stream.next_seq_id)
        return _with_row(stream, seq_id, Row(FAILED, result=()) if hopeless else Row(QUEUED))

    def cancel(self, stream: Stream, seq_id: int) -> Stream | None:
        row = stream.rows[seq_id]
        if row is None or row.state in FINISHED:
            return None
        return _with_row(stream, seq_id, row._replace(state=CANCELLED, result=()))

    # engines

    def claimable(self, stream: Stream, program: str, *, alone: bool) -> Iterator[int]:
        """One at a time: taking several in one transaction is taking them with nothing between."""
        if program[0] == SAMPLE:
            for seq_id, row in enumerate(stream.rows):
                if row is not None and row.state == QUEUED and (row.alone or not alone):
                    yield seq_id
            return
        for seq_id in range(stream.next_seq_id, len(stream.rows)):
            row = stream.rows[seq_id]
            if row is None or not row.kept:
                return
            if row.state == QUEUED:
                if row.alone or not alone:
                    yield seq_id
                return

    def claim(self, stream: Stream, program: str, seq_id: int) -> Stream:
        row = stream.rows[seq_id]
        assert row is not None
        stream = _with_row(stream, seq_id, row._replace(state=RUNNING, attempts=row.attempts + 1))
        return stream if program[0] == SAMPLE else stream._replace(next_seq_id=seq_id + 1)

    def complete(self, stream: Stream, program: str, seq_id: int, result: Content) -> Stream:
        row = stream.rows[seq_id]
        assert row is not None
        if row.state != RUNNING and "complete_twice" not in self._mutations:
            return stream
        stream = _with_row(stream, seq_id, row._replace(state=SUCCEEDED, result=result))
        return stream if program[0] == SAMPLE else _applied(stream, seq_id)

    def requeue(self, stream: Stream, program: str, ended: Ended) -> Stream:
        ordered = program[0] != SAMPLE
        for seq_id, running in enumerate(stream.rows):
            if running is None or running.state != RUNNING:
                continue
            row = self._counted(running, ended)
            if ended != "stopped" and self._too_often(row, ended):
                stream = _with_row(stream, seq_id, row._replace(state=FAILED, result=GAVE_UP))
                stream = _applied(stream, seq_id) if ordered else stream
                continue
            if ended != "stopped" and "requeue_in_company" not in self._mutations:
                row = row._replace(alone=ordered or row.attempts >= self._bounds.max_attempts - 1)
            stream = _with_row(stream, seq_id, row._replace(state=QUEUED))
            if ordered and "requeue_keeps_position" not in self._mutations:
                stream = stream._replace(next_seq_id=min(stream.next_seq_id, seq_id))
        return stream

    def _counted(self, row: Row, ended: Ended) -> Row:
        """`claim` has counted an attempt."""
        if ended != "crashed" or "requeue_without_attempts" in self._mutations:
            row = row._replace(attempts=row.attempts - 1)
        return row._replace(interruptions=row.interruptions + 1) if ended == "interrupted" else row

    def _too_often(self, row: Row, ended: Ended) -> bool:
        if ended == "interrupted":
            return row.interruptions >= self._bounds.max_interruptions
        return row.attempts >= self._bounds.max_attempts

    def fail_gaps(self, stream: Stream) -> Iterator[Stream]:
        """Whatever comes back may have waited long enough or not: once for each that may be the last that has."""
        rows, first = stream.rows, stream.next_seq_id
        if "gap_closed_while_running" not in self._mutations and any(row and row.state == RUNNING for row in rows):
            return
        missing = first
        while missing < len(rows) and (row := rows[missing]) is not None and row.kept:
            if row.state == QUEUED:
                return
            missing += 1
        behind = [n for n in range(missing, len(rows)) if (row := rows[n]) is not None and row.state == QUEUED]
        for last in behind:
            moved = stream._replace(next_seq_id=last + 1, applied_seq_id=last)
            for seq_id in behind:
                if seq_id <= last:
                    moved = _with_row(moved, seq_id, Row(FAILED, result=()))
            yield moved

    def add_snapshot(self, stream: Stream, seq_id: int, directory: str) -> Stream | None:
        """Return None where it is refused."""
        if seq_id > stream.applied_seq_id and "snapshot_early" not in self._mutations:
            return None
        others = [each for each in stream.snapshots if each[0] != seq_id]
        newest = sorted([*others, (seq_id, directory)], reverse=True)[: self._bounds.keep]
        return stream._replace(snapshots=tuple(newest))

    # housekeeping

    def prune(self, stream: Stream, program: str) -> Iterator[tuple[int, Stream]]:
        """One at a time, whichever are old enough."""
        snapshots = [seq_id for seq_id, _ in stream.snapshots]
        bound = max if "prune_past_oldest" in self._mutations else min
        needed_after = bound(snapshots, default=-1)
        for seq_id, row in enumerate(stream.rows):
            if row is None or row.state not in FINISHED or not row.kept:
                continue
            if program[0] != SAMPLE and (seq_id >= stream.next_seq_id or seq_id > needed_after):
                continue
            pruned = _with_row(stream, seq_id, row._replace(kept=False))
            yield seq_id, pruned._replace(pruned_seq_id=max(pruned.pruned_seq_id, seq_id))


def _with_row(stream: Stream, seq_id: int, row: Row) -> Stream:
    return stream._replace(rows=replaced(stream.rows, seq_id, row))


def _applied(stream: Stream, seq_id: int) -> Stream:
    return stream._replace(applied_seq_id=max(stream.applied_seq_id, seq_id))
