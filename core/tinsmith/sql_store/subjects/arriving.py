"""Arrival: which operations of a model have nothing missing before them.

Up to `arrived_seq_id` of a model nothing is missing. What is queued beyond is `early`, and no claim looks at it. When
the missing operation arrives, those that waited for it alone get their turn.

While a gap is being failed (`gaps.py`), `next_seq_id` is ahead, and everything that the model has queued is early. Once
the session has ended, everything behind the model's `unload_seq_id` stays early until it has failed.

The functions change the run that they are given. Their callers write it.
"""

from sqlalchemy import Connection

from tinsmith.sql_store.statements import Change, Query
from tinsmith.sql_store.subjects.models import Run, SeqId

_FROM = "FROM operations WHERE subject_id = :model AND seq_id"
_IS_THERE = Query(f"SELECT seq_id {_FROM} = :first", SeqId)
_LAST_BEFORE_A_GAP = Query(
    f"SELECT seq_id {_FROM} >= :first AND NOT EXISTS (SELECT 1 FROM operations AS following "
    "WHERE following.subject_id = :model AND following.seq_id = operations.seq_id + 1) ORDER BY seq_id LIMIT 1",
    SeqId,
)
_NO_LONGER_EARLY = Change(
    f"UPDATE operations SET early = FALSE, turn = (SELECT max(turn) {_FROM} >= :first AND seq_id <= :last) "
    "WHERE subject_id = :model AND seq_id >= :first AND seq_id <= :last "
    "AND operations.state = 'queued' AND operations.early"
)


def is_early(run: Run, seq_id: int) -> bool:
    """Return whether an operation would have to wait for a missing one."""
    return seq_id > run.arrived_seq_id + 1 or fails_a_gap(run)


def fails_a_gap(run: Run) -> bool:
    return run.arrived_seq_id + 1 < run.next_seq_id


def note(connection: Connection, run: Run, seq_id: int, *, followed: bool) -> None:
    """Note that an operation has arrived; `followed`, that the next one was there before it."""
    if seq_id != run.arrived_seq_id + 1 or fails_a_gap(run):
        return
    run.arrived_seq_id = seq_id
    if followed:
        let_follow(connection, run)


def let_follow(connection: Connection, run: Run) -> None:
    """Move `arrived_seq_id` over everything that is there behind it."""
    last = last_before_a_gap(connection, run, run.arrived_seq_id + 1)
    if run.unload_seq_id is not None:  # what comes after the UnloadModel stays early, and fails
        last = min(last, run.unload_seq_id)
    if last > run.arrived_seq_id:
        # from the operation before: it may have closed the gap, and nothing may pass it
        _NO_LONGER_EARLY.run(connection, model=run.model_id, first=run.arrived_seq_id, last=last)
        run.arrived_seq_id = last


def last_before_a_gap(connection: Connection, run: Run, first: int) -> int:
    """Return the last of the seq_ids that are there from `first` on without a gap; `first` - 1 if there is none."""
    if _IS_THERE.first(connection, model=run.model_id, first=first) is None:
        return first - 1
    last = _LAST_BEFORE_A_GAP.first(connection, model=run.model_id, first=first)
    assert last is not None
    return last.seq_id
