"""Submitting operations: one row for each (subject_id, seq_id). A repeat finds the first row.

Up to `arrived_seq_id` of a model nothing is missing. Operations beyond are `early`, and no claim looks at them. When
the missing operation arrives, those that waited for it alone arrive with it. While a model is parked, nothing arrives,
so all of its operations are early until it is back. Only its UnloadModel arrives, if nothing is before it.

While a gap is being failed (`gaps.py`), `next_seq_id` is ahead, and everything that the model has queued is early. Once
the session has ended, everything behind the model's `unload_seq_id` stays early until it has failed.
"""

from collections.abc import Mapping
from typing import Any, Final, NamedTuple

from sqlalchemy import Connection

from tinsmith.operations import Failed
from tinsmith.sql_store.group_commit import locks
from tinsmith.sql_store.statements import Change, Query, insert_into
from tinsmith.sql_store.subjects import log, models
from tinsmith.sql_store.subjects.models import Run
from tinsmith.sql_store.transaction import Transaction
from tinsmith.store import EngineState, NewOperation, RunState
from tinsmith.store.refusals import (
    lost,
    missing,
    no_engine,
    pruned_already,
    session_ended,
    too_late,
    unloaded,
    used_already,
)
from tinsmith.store.request_ids import new_request_id
from tinsmith.store.wakeups import places_topic, work_topic


class Neighbour(NamedTuple):
    """An operation that was submitted before."""

    seq_id: int
    request_id: str
    digest: bytes
    arrival: int


class Engine(NamedTuple):
    state: EngineState
    detail: str


class _End(NamedTuple):
    ended: str | None
    end_detail: str | None


Neighbours = Mapping[int, Neighbour]  # by seq_id

_LARGEST: Final = (1 << 63) - 1
_NEAR = Query(
    "SELECT FIELDS FROM operations WHERE subject_id = :subject_id AND seq_id >= :first AND seq_id <= :last",
    Neighbour,
)
# The lock only waits for `engines.report` giving the engine up, which fails everything submitted before it.
_ENGINE = Query("SELECT FIELDS FROM engines WHERE base_model = :base_model FOR KEY SHARE", Engine)
_FIND_END = "SELECT FIELDS FROM sessions WHERE session_id = :session_id"
_END, _END_LOCKED = Query(_FIND_END, _End), Query(f"{_FIND_END} FOR SHARE", _End)
_NEWEST = "(SELECT coalesce(max(id), 0) + 1 FROM operations)"
_INSERT = Change(
    "INSERT INTO operations (request_id, base_model, kind, tenant, session_id, subject_id, seq_id, ordered, early, "
    "arrival, num_tokens, num_bytes, payload_bytes, digest, state, created_at, attempts, interruptions, alone, "
    "cancel_told, traceparent) "
    "VALUES (:request_id, :base_model, :kind, :tenant, :session_id, :subject_id, :seq_id, :ordered, :early, "
    f"CASE WHEN {_NEWEST} > :least_arrival THEN {_NEWEST} ELSE :least_arrival END, "
    ":num_tokens, :num_bytes, :payload_bytes, :digest, 'queued', :now, 0, 0, FALSE, TRUE, :traceparent)"
)
_INSERT_PAYLOAD = Change(insert_into("payloads", "operation_id", "payload"))
_REQUESTED = Change(
    "UPDATE runs SET last_request_at = :now, arrived_seq_id = :arrived, state = :state, state_reason = :reason "
    "WHERE model_id = :model"
)

_FROM = "FROM operations WHERE subject_id = :model AND seq_id"
_IS_THERE = Query(f"SELECT seq_id {_FROM} = :first", int)
_LAST_BEFORE_A_GAP = Query(
    f"SELECT seq_id {_FROM} >= :first AND NOT EXISTS (SELECT 1 FROM operations AS following "
    "WHERE following.subject_id = :model AND following.seq_id = operations.seq_id + 1) ORDER BY seq_id LIMIT 1",
    int,
)
_NO_LONGER_EARLY = Change(
    f"UPDATE operations SET early = FALSE, arrival = (SELECT max(arrival) {_FROM} >= :first AND seq_id <= :last) "
    "WHERE subject_id = :model AND seq_id >= :first AND seq_id <= :last "
    "AND operations.state = 'queued' AND operations.early"
)


def _models_of(_: Connection, operation: NewOperation) -> list[str]:
    return [operation.subject_id] if operation.ordered else []


@locks(_models_of)
def submit(tx: Transaction, operation: NewOperation) -> str:
    run = _locked_run(tx.connection, operation.subject_id) if operation.ordered else None
    near = neighbours(tx.connection, operation)
    if (same := near.get(operation.seq_id)) is not None:
        return _repeat(tx.connection, operation, run, same)
    failed = _hopeless(tx.connection, operation, run) or operation.refused
    request_id = insert(tx, operation, run, near, with_payload=failed is None)
    if failed is not None:
        log.finish(tx, log.find(tx.connection, request_id), failed)
        if run is not None and run.state == RunState.CREATING and operation.seq_id == 0:
            run.state, run.state_reason = RunState.LOST, failed.message
    if run is not None:
        changed = {"arrived": run.arrived_seq_id, "state": run.state, "reason": run.state_reason}
        _REQUESTED.run(tx.connection, model=run.model_id, now=tx.now, **changed)
    parked = run is not None and run.state == RunState.PARKED
    tx.wake.append((places_topic if parked else work_topic)(operation.base_model))
    return request_id


def _locked_run(connection: Connection, model_id: str) -> Run:
    run = models.locked(connection, model_id)
    if run is None:
        raise missing("model", model_id)
    return run


def neighbours(connection: Connection, operation: NewOperation) -> Neighbours:
    """Find the operation if it was submitted before, and the ones before and after it if it has an order."""
    reach = 1 if operation.ordered else 0
    first, last = operation.seq_id - reach, min(operation.seq_id + reach, _LARGEST)
    found = _NEAR.all(connection, subject_id=operation.subject_id, first=first, last=last)
    return {each.seq_id: each for each in found}


def refuse_ended_session(connection: Connection, session_id: str, *, lock: bool = False) -> None:
    """With `lock`, the session cannot end before the transaction does."""
    row = (_END_LOCKED if lock else _END).first(connection, session_id=session_id)
    if row is not None and row.ended is not None:
        raise session_ended(session_id, row.ended, row.end_detail)


def refuse_unloaded(run: Run) -> None:
    """Call once it is known that the session has not ended: that unloads models as well."""
    if run.unload_seq_id is not None:
        raise unloaded(run.model_id)


def _repeat(connection: Connection, operation: NewOperation, run: Run | None, same: Neighbour) -> str:
    if same.digest != operation.digest:
        if run is not None:  # an UnloadModel may have been queued under this seq_id
            refuse_ended_session(connection, run.session_id)
            refuse_unloaded(run)
        raise used_already(operation)
    return same.request_id


def _hopeless(connection: Connection, operation: NewOperation, run: Run | None) -> Failed | None:
    """Return why an operation can never run, or None. Raise if it cannot even be recorded."""
    if run is not None:
        if operation.seq_id <= run.pruned_seq_id:
            raise pruned_already(operation)
        refuse_ended_session(connection, run.session_id)
        refuse_unloaded(run)
        if operation.seq_id < run.next_seq_id:
            return too_late(operation, run.next_seq_id)
        if run.state == RunState.LOST:
            return lost(run.model_id, run.state_reason)
        if run.state in (RunState.READY, RunState.PARKED):
            return None  # waits for the next engine if this one has been given up
    engine = _ENGINE.first(connection, base_model=operation.base_model)
    if engine is not None and engine.state == EngineState.FAILED:
        return no_engine(operation.base_model, engine.detail)
    return None


def insert(
    tx: Transaction, operation: NewOperation, run: Run | None, near: Neighbours, *, with_payload: bool = True
) -> str:
    """Insert the row of an operation, and note its arrival. Return its request_id. What cannot run needs no payload.

    It comes after everything else, and not before the one before it. The caller writes what changes of `run`.
    """
    request_id = new_request_id(tx.now)
    before = near.get(operation.seq_id - 1)
    payload_bytes = len(operation.payload) if with_payload else 0
    values: dict[str, Any] = {  # Any: values of the columns
        "request_id": request_id,
        "base_model": operation.base_model,
        "kind": operation.kind,
        "tenant": operation.tenant,
        "session_id": operation.session_id,
        "subject_id": operation.subject_id,
        "seq_id": operation.seq_id,
        "ordered": operation.ordered,
        "early": with_payload and run is not None and is_early(run, operation.seq_id),
        "least_arrival": 0 if before is None else before.arrival,
        "num_tokens": operation.num_tokens,
        "num_bytes": operation.num_bytes,
        "payload_bytes": payload_bytes,
        "digest": operation.digest,
        "traceparent": operation.traceparent,
        "now": tx.now,
    }
    key = _INSERT.insert(tx.connection, values)
    tx.count(log.PENDING, (operation.tenant, operation.kind, False), 1, payload_bytes, payload_bytes)
    if with_payload:
        _INSERT_PAYLOAD.run(tx.connection, operation_id=key, payload=operation.payload)
    if run is not None:
        _note_arrival(tx.connection, run, operation.seq_id, followed=operation.seq_id + 1 in near)
    return request_id


# arrival: the caller writes the run


def is_early(run: Run, seq_id: int) -> bool:
    """Return whether an operation would have to wait, for a missing one or for a place."""
    return seq_id > run.arrived_seq_id + 1 or fails_a_gap(run) or _waits_for_return(run, seq_id)


def _waits_for_return(run: Run, seq_id: int) -> bool:
    """Return whether an operation cannot run before its model is back. To unload a parked model, it may stay away."""
    return run.state == RunState.PARKED and seq_id != run.unload_seq_id


def fails_a_gap(run: Run) -> bool:
    return run.arrived_seq_id + 1 < run.next_seq_id


def _note_arrival(connection: Connection, run: Run, seq_id: int, *, followed: bool) -> None:
    """Note that an operation has arrived; `followed`, that the next one was there before it."""
    if is_early(run, seq_id) or seq_id <= run.arrived_seq_id:
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
    return last
