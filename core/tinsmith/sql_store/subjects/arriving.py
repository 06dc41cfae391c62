"""Arrival: which operations of a model have nothing missing before them.

Up to `arrived_seq_id` of a model nothing is missing. What is queued beyond is `early`, and no claim looks at it. When
the missing operation arrives, those that waited for it alone get its turn.

While a gap is being failed (`gaps.py`), `next_seq_id` is ahead, and everything that the model has queued is early. Once
the session has ended, everything behind the model's `unload_seq_id` stays early until it has failed.
"""

from collections.abc import Mapping
from typing import Any, Protocol

import sqlalchemy
from sqlalchemy import Integer, bindparam, case, func
from sqlmodel import Session

from tinsmith.sql_store.prepared import Prepared
from tinsmith.sql_store.tables import EARLY, OPERATIONS


class Arrivals(Protocol):
    """What a model's row says about arrival. The caller writes what changes."""

    model_id: str
    next_seq_id: int
    arrived_seq_id: int
    unload_seq_id: int | None


_NEWEST = sqlalchemy.select(func.coalesce(func.max(OPERATIONS.c.id), 0) + 1).scalar_subquery()
_LEAST = bindparam("least_turn", type_=Integer)
_INSERT = Prepared(OPERATIONS.insert().values(turn=case((_NEWEST > _LEAST, _NEWEST), else_=_LEAST)))

_Of = OPERATIONS.c.subject_id == bindparam("model")
_From = OPERATIONS.c.seq_id >= bindparam("first")
_following = OPERATIONS.alias("following")
_follows = sqlalchemy.exists().where(
    _following.c.subject_id == bindparam("model"), _following.c.seq_id == OPERATIONS.c.seq_id + 1
)
_IS_THERE = sqlalchemy.select(OPERATIONS.c.id).where(_Of, OPERATIONS.c.seq_id == bindparam("first"))
_LAST_BEFORE_A_GAP = (
    sqlalchemy.select(OPERATIONS.c.seq_id).where(_Of, _From, ~_follows).order_by(OPERATIONS.c.seq_id).limit(1)
)
_same = OPERATIONS.alias("same")
_last_turn = (
    sqlalchemy.select(func.max(_same.c.turn))
    .where(
        _same.c.subject_id == bindparam("model"),
        _same.c.seq_id >= bindparam("first"),
        _same.c.seq_id <= bindparam("last"),
    )
    .scalar_subquery()
)
_NO_LONGER_EARLY = (
    OPERATIONS.update()
    .where(_Of, _From, OPERATIONS.c.seq_id <= bindparam("last"), EARLY)
    .values(early=False, turn=_last_turn)
)


def insert(session: Session, values: Mapping[str, Any], *, least_turn: int = 0) -> int:  # Any: values of the columns
    """Insert an operation, and return its id. Its turn comes after everything else, and is at least `least_turn`."""
    return _INSERT.insert(session.connection(), {**values, "least_turn": least_turn})


def is_early(run: Arrivals, seq_id: int) -> bool:
    """Return whether an operation would have to wait for a missing one."""
    return seq_id > run.arrived_seq_id + 1 or fails_a_gap(run)


def fails_a_gap(run: Arrivals) -> bool:
    return run.arrived_seq_id + 1 < run.next_seq_id


def note(session: Session, run: Arrivals, seq_id: int, *, followed: bool) -> None:
    """Note that an operation has arrived; `followed`, that the next one was there before it."""
    if seq_id != run.arrived_seq_id + 1 or fails_a_gap(run):
        return
    run.arrived_seq_id = seq_id
    if followed:
        let_follow(session, run)


def let_follow(session: Session, run: Arrivals) -> None:
    """Move `arrived_seq_id` over everything that is there behind it."""
    last = last_before_a_gap(session, run, run.arrived_seq_id + 1)
    if run.unload_seq_id is not None:  # what comes after the UnloadModel stays early, and fails
        last = min(last, run.unload_seq_id)
    if last > run.arrived_seq_id:
        # from the operation before: it may have closed the gap, and nothing may pass it
        turns = {"model": run.model_id, "first": run.arrived_seq_id, "last": last}
        session.connection().execute(_NO_LONGER_EARLY, turns)
        run.arrived_seq_id = last


def last_before_a_gap(session: Session, run: Arrivals, first: int) -> int:
    """Return the last of the seq_ids that are there from `first` on without a gap; `first` - 1 if there is none."""
    values = {"model": run.model_id, "first": first}
    if session.connection().execute(_IS_THERE, values).first() is None:
        return first - 1
    last: int = session.connection().execute(_LAST_BEFORE_A_GAP, values).scalar_one()
    return last
