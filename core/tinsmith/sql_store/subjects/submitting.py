"""Submitting operations: one row for each (subject_id, seq_id). A repeat finds the first row."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Final, NamedTuple

import sqlalchemy
from sqlalchemy import bindparam
from sqlmodel import Session

from tinsmith.errors import ConflictError, NotFoundError, ResultExpiredError, UserError
from tinsmith.operations import Failed
from tinsmith.sql_store.prepared import Prepared
from tinsmith.sql_store.subjects import arriving, log
from tinsmith.sql_store.subjects.request_ids import new_request_id
from tinsmith.sql_store.subjects.transaction import Transaction
from tinsmith.sql_store.tables import ENGINES, OPERATIONS, PAYLOADS, RUNS, SESSIONS
from tinsmith.store import EngineState, NewOperation, OperationState, RunState


class Neighbour(NamedTuple):
    """An operation that was submitted before."""

    seq_id: int
    request_id: str
    digest: bytes
    turn: int


Neighbours = Mapping[int, Neighbour]  # by seq_id


@dataclass(slots=True)
class _Run:
    """What a submit reads of a model's row."""

    model_id: str
    session_id: str
    state: RunState
    state_reason: str | None
    next_seq_id: int
    arrived_seq_id: int
    pruned_seq_id: int
    unload_seq_id: int | None


_LARGEST: Final = (1 << 63) - 1
_NEAR = Prepared(
    sqlalchemy.select(OPERATIONS.c.seq_id, OPERATIONS.c.request_id, OPERATIONS.c.digest, OPERATIONS.c.turn).where(
        OPERATIONS.c.subject_id == bindparam("subject_id"),
        OPERATIONS.c.seq_id >= bindparam("first"),
        OPERATIONS.c.seq_id <= bindparam("last"),
    )
)
# The lock only waits for `engine_states.report` giving the engine up, which fails everything submitted before it.
_ENGINE = Prepared(
    sqlalchemy.select(ENGINES.c.state, ENGINES.c.detail)
    .where(ENGINES.c.base_model == bindparam("base_model"))
    .with_for_update(read=True, key_share=True)
)
_FIND_END = sqlalchemy.select(SESSIONS.c.ended, SESSIONS.c.end_detail).where(
    SESSIONS.c.session_id == bindparam("session_id")
)
_END, _END_LOCKED = Prepared(_FIND_END), Prepared(_FIND_END.with_for_update(read=True))
_INSERT_PAYLOAD = Prepared(PAYLOADS.insert())
_RUN = Prepared(
    sqlalchemy.select(*(RUNS.c[each.name] for each in fields(_Run)))
    .where(RUNS.c.model_id == bindparam("model"))
    .with_for_update()
)
_CHANGE_RUN = Prepared(
    RUNS.update()
    .where(RUNS.c.model_id == bindparam("model"))
    .values(
        last_request_at=bindparam("now"),
        arrived_seq_id=bindparam("arrived"),
        state=bindparam("new_state"),
        state_reason=bindparam("reason"),
    )
)


def models_of(session: Session, operation: NewOperation) -> list[str]:
    """Return the models that `submit` changes."""
    del session
    return [operation.subject_id] if operation.ordered else []


def submit(tx: Transaction, operation: NewOperation) -> str:
    run = _locked_run(tx.session, operation.subject_id) if operation.ordered else None
    near = neighbours(tx.session, operation)
    if (same := near.get(operation.seq_id)) is not None:
        return _repeat(tx.session, operation, run, same.request_id, same.digest)
    failed = _hopeless(tx.session, operation, run) or operation.refused
    request_id = insert(tx, operation, run, near, with_payload=failed is None)
    if failed is not None:
        log.finish(tx, [log.find(tx.session, request_id)], failed)
        if run is not None and run.state == RunState.CREATING and operation.seq_id == 0:
            run.state, run.state_reason = RunState.LOST, failed.message
    if run is not None:
        _write_run(tx, run)
    tx.wake.append(log.work_topic(operation.base_model))
    return request_id


def _locked_run(session: Session, model_id: str) -> _Run:
    """Lock the model's row, as `log.locked_run` does, and read it without mapping it: this is the hottest path."""
    row = _RUN.first(session.connection(), {"model": model_id})
    if row is None:
        msg = f"no model {model_id!r}"
        raise NotFoundError(msg)
    return _Run(*row)


def _write_run(tx: Transaction, run: _Run) -> None:
    changed = {"arrived": run.arrived_seq_id, "new_state": run.state, "reason": run.state_reason, "now": tx.now}
    _CHANGE_RUN.run(tx.session.connection(), {"model": run.model_id, **changed})


def neighbours(session: Session, operation: NewOperation) -> Neighbours:
    """Find the operation if it was submitted before, and the ones before and after it if it has an order."""
    reach = 1 if operation.ordered else 0
    first, last = operation.seq_id - reach, min(operation.seq_id + reach, _LARGEST)
    values = {"subject_id": operation.subject_id, "first": first, "last": last}
    found = [Neighbour(*row) for row in _NEAR.all(session.connection(), values)]
    return {each.seq_id: each for each in found}


def refuse_ended_session(session: Session, session_id: str, *, lock: bool = False) -> None:
    """With `lock`, the session cannot end before the transaction does."""
    row = (_END_LOCKED if lock else _END).first(session.connection(), {"session_id": session_id})
    if row is not None and row.ended is not None:
        detail = f": {row.end_detail}" if row.end_detail else ""
        msg = f"session {session_id!r} has ended ({row.ended}{detail}); create a new one"
        raise UserError(msg)


def _repeat(session: Session, operation: NewOperation, run: _Run | None, request_id: str, digest: bytes) -> str:
    if digest != operation.digest:
        if run is not None:  # the end of the session may have queued an UnloadModel under this seq_id
            refuse_ended_session(session, run.session_id)
        msg = (
            f"seq_id {operation.seq_id} of {operation.subject_id!r} was already used by a request with other content; "
            "every request needs a seq_id of its own"
        )
        raise ConflictError(msg)
    return request_id


def _hopeless(session: Session, operation: NewOperation, run: _Run | None) -> Failed | None:
    """Return why an operation can never run, or None. Raise if it cannot even be recorded."""
    if run is not None:
        if operation.seq_id <= run.pruned_seq_id:
            msg = f"the result of seq_id {operation.seq_id} of {operation.subject_id!r} is past its retention"
            raise ResultExpiredError(msg)
        refuse_ended_session(session, run.session_id)
        if operation.seq_id < run.next_seq_id:
            return Failed(
                message=f"seq_id {operation.seq_id} of {operation.subject_id!r} arrived after the model had gone on "
                f"without it, to seq_id {run.next_seq_id}; send requests in order, or sooner",
            )
        if run.state == RunState.LOST:
            return lost(run.model_id, run.state_reason)
        if run.state == RunState.READY:
            return None  # waits for the next engine if this one has been given up
    engine = _ENGINE.first(session.connection(), {"base_model": operation.base_model})
    if engine is not None and engine.state == EngineState.FAILED:
        return no_engine(operation.base_model, engine.detail)
    return None


def lost(model_id: str, reason: str | None) -> Failed:
    return Failed(
        message=f"model {model_id!r} is lost: {reason or 'its engine ended'}; create a new one, from a checkpoint if "
        "there is one",
        category="server",
    )


def no_engine(base_model: str, detail: str) -> Failed:
    return Failed(message=f"base model {base_model!r} cannot be served: {detail}", category="server")


def insert(
    tx: Transaction,
    operation: NewOperation,
    run: arriving.Arrivals | None,
    near: Neighbours,
    *,
    with_payload: bool = True,
) -> str:
    """Insert the row of an operation, and note its arrival. Return its request_id. What cannot run needs no payload.

    The caller writes what changes of `run`.
    """
    request_id = new_request_id(tx.now)
    values: dict[str, Any] = {  # Any: values of the columns
        "request_id": request_id,
        "base_model": operation.base_model,
        "kind": operation.kind,
        "tenant": operation.tenant,
        "session_id": operation.session_id,
        "subject_id": operation.subject_id,
        "seq_id": operation.seq_id,
        "ordered": operation.ordered,
        "num_tokens": operation.num_tokens,
        "num_bytes": operation.num_bytes,
        "payload_bytes": len(operation.payload) if with_payload else 0,
        "early": with_payload and run is not None and arriving.is_early(run, operation.seq_id),
        "digest": operation.digest,
        "state": OperationState.QUEUED,
        "created_at": tx.now,
        "attempts": 0,
        "interruptions": 0,
        "alone": False,
        "cancel_told": True,
    }
    before = near.get(operation.seq_id - 1)
    key = arriving.insert(tx.session, values, least_turn=0 if before is None else before.turn)
    tx.pending.arrived(operation.tenant, operation.kind, values["payload_bytes"])
    if with_payload:
        _INSERT_PAYLOAD.run(tx.session.connection(), {"operation_id": key, "payload": operation.payload})
    if run is not None:
        arriving.note(tx.session, run, operation.seq_id, followed=operation.seq_id + 1 in near)
    return request_id
