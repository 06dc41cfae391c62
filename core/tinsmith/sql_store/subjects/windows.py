"""Windows: a model's operations since its pending gradient was cleared, and whether a pass among them failed."""

import sqlalchemy
from sqlalchemy import ColumnElement, Connection, and_, bindparam, or_

from tinsmith.operations import Failed
from tinsmith.sql_store.tables import OPERATIONS, RESULTS
from tinsmith.store import FailedPass, OperationState
from tinsmith.store.codec import decode_result
from tinsmith.store.engine_log import CLEARING, PASS

_of_model = OPERATIONS.c.subject_id == bindparam("model")
_before = OPERATIONS.c.seq_id < bindparam("before")
_FAILED_PASS = and_(
    OPERATIONS.c.state == OperationState.FAILED,
    or_(
        OPERATIONS.c.kind == PASS, OPERATIONS.c.early
    ),  # or an operation that was failed behind a gap, which may have been a pass
)
_LAST_CLEARING = (
    sqlalchemy.select(OPERATIONS.c.seq_id)
    .where(_of_model, _before, OPERATIONS.c.kind.in_(CLEARING), OPERATIONS.c.state == OperationState.SUCCEEDED)
    .order_by(OPERATIONS.c.seq_id.desc())
    .limit(1)
)
_FIRST_FAILED = (
    sqlalchemy.select(OPERATIONS.c.seq_id, OPERATIONS.c.request_id, RESULTS.c.result_kind, RESULTS.c.result)
    .join_from(OPERATIONS, RESULTS, RESULTS.c.operation_id == OPERATIONS.c.id)
    .where(_of_model, _before, OPERATIONS.c.seq_id > bindparam("after"), _FAILED_PASS)
    .order_by(OPERATIONS.c.seq_id)
    .limit(1)
)
_later = OPERATIONS.alias("later")


def is_done_with() -> ColumnElement[bool]:
    """Return the condition that no step depends on an operation any more, for all that it is a pass that failed."""
    cleared = sqlalchemy.exists().where(
        _later.c.subject_id == OPERATIONS.c.subject_id,
        _later.c.seq_id > OPERATIONS.c.seq_id,
        _later.c.kind.in_(CLEARING),
        _later.c.state == OperationState.SUCCEEDED,
    )
    return or_(sqlalchemy.not_(_FAILED_PASS), cleared)


def failed_pass(
    connection: Connection, model_id: str, *, after_seq_id: int | None, before_seq_id: int
) -> FailedPass | None:
    values = {"model": model_id, "before": before_seq_id}
    after = after_seq_id if after_seq_id is not None else connection.execute(_LAST_CLEARING, values).scalar()
    after = -1 if after is None else after
    row = connection.execute(_FIRST_FAILED, {**values, "after": after}).first()
    if row is None:
        return None
    failure = decode_result(row.result_kind, row.result)
    assert isinstance(failure, Failed)
    return FailedPass(seq_id=row.seq_id, request_id=row.request_id, failure=failure)
