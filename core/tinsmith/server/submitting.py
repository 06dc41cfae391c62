"""From a request to a row in the log. A submit is answered at once; whatever it needs happens behind its future."""

import hashlib
from collections.abc import Callable
from typing import Final

from starlette.concurrency import run_in_threadpool

from tinsmith import operations as ops
from tinsmith.checks import check_operation
from tinsmith.errors import UserError
from tinsmith.failpoints import durable_boundary
from tinsmith.hook_values import Principal
from tinsmith.protocol import translate, wire
from tinsmith.server.context import ServerContext
from tinsmith.store import NewOperation, RunRecord
from tinsmith.store.codec import encode_operation, kind_of

LARGE_BYTES: Final = 1 << 18
"""Bodies from here on are taken apart in a thread: the event loop answers heartbeats meanwhile."""


@durable_boundary("server.submit")
async def submit_training(
    context: ServerContext,
    run: RunRecord,
    seq_id: int,
    *,
    kind: str,
    build: Callable[[], ops.TrainingOperation],
    body_bytes: int = 0,
) -> wire.Submitted:
    """Record what `build` returns. Where it raises UserError, the refusal is recorded: it consumes the seq_id too."""
    capabilities = await context.engines.capabilities(run.base_model)

    def prepare() -> NewOperation:
        try:
            operation = build()
        except UserError as error:
            return _refused(run, seq_id, kind, error)
        refused: ops.Failed | None = None
        if capabilities is not None:
            try:
                check_operation(operation, capabilities, context.losses)
            except UserError as error:
                refused = ops.Failed(message=str(error), category=error.category)
        return new_training_operation(run, seq_id, operation, refused=refused)

    operation = await run_in_threadpool(prepare) if body_bytes >= LARGE_BYTES else prepare()
    request_id = await context.store.submit(operation)
    count(context, operation)
    return wire.Submitted(request_id=request_id, model_id=run.model_id)


def new_training_operation(
    run: RunRecord, seq_id: int, operation: ops.TrainingOperation, *, refused: ops.Failed | None = None
) -> NewOperation:
    return NewOperation(
        base_model=run.base_model,
        kind=kind_of(operation),
        tenant=run.tenant,
        session_id=run.session_id,
        subject_id=run.model_id,
        seq_id=seq_id,
        ordered=True,
        payload=b"" if refused is not None else encode_operation(operation),
        digest=translate.digest(operation),
        num_tokens=operation.num_tokens if isinstance(operation, ops.ForwardBackward) else 0,
        refused=refused,
    )


def _refused(run: RunRecord, seq_id: int, kind: str, error: UserError) -> NewOperation:
    """There is no operation to compare a repeat by; the same fault has the same message."""
    return NewOperation(
        base_model=run.base_model,
        kind=kind,
        tenant=run.tenant,
        session_id=run.session_id,
        subject_id=run.model_id,
        seq_id=seq_id,
        ordered=True,
        payload=b"",
        digest=hashlib.sha256(f"{kind}\0{error}".encode()).digest(),
        refused=ops.Failed(message=str(error), category=error.category),
    )


def new_sample(
    operation: ops.Sample, *, base_model: str, caller: Principal, session_id: str, seq_id: int
) -> NewOperation:
    return NewOperation(
        base_model=base_model,
        kind=kind_of(operation),
        tenant=caller.tenant,
        session_id=session_id,
        subject_id=operation.sampling_session_id,
        seq_id=seq_id,
        ordered=False,
        payload=encode_operation(operation),
        digest=translate.digest(operation),
        num_tokens=len(operation.prompt_P) + operation.num_samples * operation.params.max_tokens,
    )


def count(context: ServerContext, operation: NewOperation) -> None:
    labels = {"base_model": operation.base_model, "kind": operation.kind}
    context.metrics.submitted.labels(**labels).inc()
    context.metrics.tokens.labels(**labels).inc(operation.num_tokens)
