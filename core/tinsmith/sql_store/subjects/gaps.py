"""Gaps: seq_ids that have not arrived, and the operations that wait behind them.

Giving up a gap takes several transactions, because thousands of operations may wait behind it. The first one decides:
it moves the model's `next_seq_id` past everything that fails. From then on the gap can no longer be filled, and nothing
of the model can be claimed. The others fail the operations, some at a time, and the last one lets the model continue.
Any process can go on where another stopped.

The end of a session is such a decision too (`unloading.py`): nothing will fill the gap, so the UnloadModel takes the
missing seq_id, and what is behind it fails in parts. Once a model is lost or unloaded, everything behind a gap fails.
"""

from datetime import datetime, timedelta
from typing import Any, Final

import sqlalchemy
from sqlalchemy import bindparam, func
from sqlmodel import Session

from tinsmith.operations import Failed
from tinsmith.sql_store.columns import Microseconds
from tinsmith.sql_store.subjects import arriving, log, model_places, submitting
from tinsmith.sql_store.subjects.transaction import Connections, Transaction
from tinsmith.sql_store.tables import EARLY, OPERATIONS, RUNS, RunRow, SessionRow
from tinsmith.store import OperationState, RunState

SILENCE: Final = timedelta(seconds=30)
"""A client sends a heartbeat every 10 s. If none arrives for longer than this, the server may be at fault."""

_PART: Final = log.PART  # operations that one transaction fails

_OURS = OPERATIONS.c.base_model == bindparam("base_model")
_OF = OPERATIONS.c.subject_id == bindparam("model")
_SINCE = OPERATIONS.c.created_at < bindparam("older_than", type_=Microseconds())


def _early_models() -> sqlalchemy.CTE:
    """Find the models that have something waiting behind a gap, with one look into the index for each."""
    subjects = sqlalchemy.select(OPERATIONS.c.subject_id).where(_OURS, EARLY).order_by(OPERATIONS.c.subject_id).limit(1)
    found = sqlalchemy.select(subjects.scalar_subquery().label("model")).cte("found", recursive=True)
    following = subjects.where(OPERATIONS.c.subject_id > found.c.model).scalar_subquery()
    return found.union_all(sqlalchemy.select(following).where(found.c.model.is_not(None)))


_found = _early_models()
_EARLY_OF_RUN = sqlalchemy.exists().where(
    OPERATIONS.c.base_model == RUNS.c.base_model, OPERATIONS.c.subject_id == RUNS.c.model_id, EARLY
)
# What is asked of the run alone comes first: of a model that goes on, no operation is looked at.
_LEFT_BEHIND = sqlalchemy.or_(
    sqlalchemy.and_(RUNS.c.unload_seq_id.is_not(None), _EARLY_OF_RUN.where(OPERATIONS.c.seq_id > RUNS.c.unload_seq_id)),
    sqlalchemy.and_(RUNS.c.state.not_in(log.LIVE), _EARLY_OF_RUN),
)
_ENDED = sqlalchemy.exists().where(RUNS.c.model_id == _found.c.model, _LEFT_BEHIND)
_MODELS = sqlalchemy.select(_found.c.model).where(
    sqlalchemy.or_(sqlalchemy.exists().where(_OURS, EARLY, OPERATIONS.c.subject_id == _found.c.model, _SINCE), _ENDED)
)
_ENDED_OF = sqlalchemy.select(RUNS.c.model_id).where(RUNS.c.session_id == bindparam("session"), _LEFT_BEHIND)
_BEYOND = OPERATIONS.c.seq_id > bindparam("arrived")
_LAST_LATE = sqlalchemy.select(func.max(OPERATIONS.c.seq_id)).where(_OF, _BEYOND, EARLY, _SINCE)
_BUSY = sqlalchemy.select(OPERATIONS.c.id).where(
    _OF,
    OPERATIONS.c.seq_id > bindparam("applied"),
    OPERATIONS.c.seq_id <= bindparam("arrived"),
    OPERATIONS.c.state.in_((OperationState.QUEUED, OperationState.RUNNING)),
)
_BEHIND = sqlalchemy.select(*log.COUNTED).where(_OF, _BEYOND, EARLY).order_by(OPERATIONS.c.seq_id)
_GIVEN_UP = _BEHIND.where(OPERATIONS.c.seq_id < bindparam("next"))


async def fail_gaps(connections: Connections, base_model: str, *, older_than: datetime) -> int:
    failed = 0
    for model_id in await connections.reader.read(waiting_since, base_model, older_than):
        failed += await fail_in_parts(connections, model_id, older_than)
    return failed


async def fail_in_parts(connections: Connections, model_id: str, older_than: datetime | None) -> int:
    """Fail what waits behind a gap, some operations at a time, so that other writes get their turn in between.

    Return how many failed. Without `older_than`, only what waits for ever fails.
    """
    failed, more = 0, True
    while more:
        number, more = await connections.durable.write_locking(_model_to_fail, fail_some, model_id, older_than)
        failed += number
    return failed


def _model_to_fail(session: Session, model_id: str, *_: object) -> list[str]:
    del session
    return [model_id]


def waiting_since(session: Session, base_model: str, older_than: datetime) -> list[str]:
    """Return the models of which something has waited behind a gap since before then, or waits for ever."""
    values = {"base_model": base_model, "older_than": older_than}
    return list(session.connection().execute(_MODELS, values).scalars())


def left_by(session: Session, session_id: str) -> list[str]:
    """Return the models of an ended session that have something waiting behind a gap."""
    return list(session.connection().execute(_ENDED_OF, {"session": session_id}).scalars())


def fail_some(tx: Transaction, model_id: str, older_than: datetime | None) -> tuple[int, bool]:
    """Fail some of what waits behind a gap for ever, or has waited since before `older_than`.

    Return how many failed, and whether there are more.
    """
    run = log.locked_run(tx.session, model_id)
    if run is None:
        return 0, False
    if arriving.fails_a_gap(run):
        return _fail_gap(tx, run)
    if run.unload_seq_id is not None:
        return _fail(tx, run, _BEHIND, run.unload_seq_id)
    if run.state not in log.LIVE:
        return _fail(tx, run, _BEHIND, run.arrived_seq_id + 1)
    if older_than is None or model_places.waits(run) or not _give_up(tx, run, older_than):
        return 0, False
    return _fail_gap(tx, run)


def _fail_gap(tx: Transaction, run: RunRow) -> tuple[int, bool]:
    failed, more = _fail(tx, run, _GIVEN_UP, run.arrived_seq_id + 1, next=run.next_seq_id)
    if more:
        return failed, True
    # now: once nothing early is left, `waiting_since` no longer finds the model
    run.arrived_seq_id = run.next_seq_id - 1
    arriving.let_follow(tx.session, run)
    tx.wake.append(log.work_topic(run.base_model))
    return failed, run.unload_seq_id is not None or run.state not in log.LIVE


def _give_up(tx: Transaction, run: RunRow, older_than: datetime) -> bool:
    """Move the model past the gap and past the last operation that has waited for too long, if there is one.

    Not while an operation before the gap is queued or runs: if it were requeued, the model would reach the gap again.
    """
    late = {"model": run.model_id, "arrived": run.arrived_seq_id, "older_than": older_than}
    last = tx.session.connection().execute(_LAST_LATE, late).scalar()
    if last is None or _is_busy(tx.session, run) or not _was_heard(tx, run, since=older_than):
        return False
    run.next_seq_id, run.applied_seq_id = last + 1, last
    return True


def _is_busy(session: Session, run: RunRow) -> bool:
    before = {"model": run.model_id, "applied": run.applied_seq_id, "arrived": run.arrived_seq_id}
    return session.connection().execute(_BUSY, before).first() is not None


def _was_heard(tx: Transaction, run: RunRow, since: datetime) -> bool:
    """Return whether heartbeats of the client have arrived all the time, so that it could have sent what is missing."""
    session = tx.session.get(SessionRow, run.session_id)
    return session is None or (session.heard_since < since and session.last_seen_at >= tx.now - SILENCE)


def _fail(tx: Transaction, run: RunRow, which: sqlalchemy.Select[Any], missing: int, **more: int) -> tuple[int, bool]:
    """Fail some of what is found behind the missing seq_id. Return how many failed, and whether there are more."""
    failed = _failure(run, missing)
    connection = tx.session.connection()
    values = {"model": run.model_id, "arrived": missing, **more}
    rows = connection.execute(which.limit(_PART), values).all()
    log.fail(tx, rows, failed)
    return len(rows), len(rows) == _PART and connection.execute(which.limit(1), values).first() is not None


def _failure(run: RunRow, missing: int) -> Failed:
    if run.state == RunState.LOST:
        return submitting.lost(run.model_id, run.state_reason)
    if run.unload_seq_id == missing:
        rest = "its session has ended"
    elif run.state == RunState.UNLOADED:
        rest = "the model has been unloaded"
    else:
        rest = "the model continues with the next request"
    return Failed(
        message=f"seq_id {missing} of {run.model_id!r} never arrived, so the requests that waited behind it "
        f"were not run; {rest}"
    )
