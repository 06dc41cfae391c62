"""An operation that an engine has claimed, and what the scheduler, observers and clients are told of it."""

from dataclasses import dataclass

from tinsmith import operations as ops
from tinsmith.errors import TinsmithError
from tinsmith.hook_values import OperationFinished
from tinsmith.scheduler import Pending
from tinsmith.store import OperationRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class Claimed:
    """`refused` where it was checked and must not run; `operation` is None only where it could not even be decoded."""

    record: OperationRecord
    operation: ops.Operation | None
    refused: ops.Failed | None = None


def as_pending(record: OperationRecord) -> Pending:
    return Pending(
        request_id=record.request_id,
        model_id=record.subject_id,
        tenant=record.tenant,
        kind=record.kind,
        seq_id=record.seq_id,
        num_tokens=record.num_tokens,
        enqueued_at_s=record.created_at.timestamp(),
    )


def finished_event(record: OperationRecord, result: ops.Result, run_s: float, *, batch_size: int) -> OperationFinished:
    assert record.started_at is not None
    return OperationFinished(
        request_id=record.request_id,
        base_model=record.base_model,
        kind=record.kind,
        tenant=record.tenant,
        model_id=record.subject_id if record.ordered else None,
        num_tokens=record.num_tokens,
        queued_s=(record.started_at - record.created_at).total_seconds(),
        run_s=run_s,
        batch_size=batch_size,
        failed=result if isinstance(result, ops.Failed) else None,
    )


def failed(error: TinsmithError) -> ops.Failed:
    return ops.Failed(message=str(error), category=error.category)
