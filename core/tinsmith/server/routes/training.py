"""Models and their training. Requests of one model run in the order of their seq_id, in whatever order they arrive."""

from functools import partial
from typing import Final

from fastapi import APIRouter, Request

from tinsmith import operations as ops
from tinsmith.checks import check_operation
from tinsmith.hook_values import Principal
from tinsmith.protocol import json_passes, stable_reinforce, training_request, translate, wire
from tinsmith.protocol.answers import JSON, PROTOBUF
from tinsmith.server.auth import Caller, own_known_run, own_session, readable_run
from tinsmith.server.context import API_PREFIX, Context, ServerContext
from tinsmith.server.error_answers import MediaTypeError
from tinsmith.server.json_routes import is_json, strictly_read
from tinsmith.server.kept import KnownOwner, KnownRun
from tinsmith.server.limits.body_budget import hold_decoded
from tinsmith.server.model_names import base_of
from tinsmith.server.refusals import NumberedRoute
from tinsmith.server.request_trace import traced
from tinsmith.server.routes.sessions import refuse_ended
from tinsmith.server.submitting import accepted, new_training_operation, submit_decoded, submit_training
from tinsmith.store import WAITS_FOR_PLACE, RunRecord, SessionRecord
from tinsmith.store.refusals import described_bytes
from tinsmith_checkpoints.values import Json

router = APIRouter(prefix=API_PREFIX, tags=["training"], route_class=NumberedRoute)

_WORK_PER_BYTE: Final = 16  # parts of a protobuf may be so small that each byte takes as long as a number in an array
_SPARSE_ELEMENT_BYTES: Final = 12  # a target and its weight


@router.post("/create_model", response_model_exclude_none=True)
async def create_model(body: wire.CreateModelRequest, caller: Caller, context: Context) -> wire.Submitted:
    """Create a model. A refusal is an HTTP error if possible: nothing can wait behind a model's first request yet."""
    session = await own_session(context, caller, body.session_id)
    operation, base_model = translate.create_model(body), await base_of(context, body.base_model)
    return await submit_creation(
        context, caller, session, operation, base_model=base_model, user_metadata=body.user_metadata
    )


async def submit_creation(
    context: ServerContext,
    caller: Principal,
    session: SessionRecord,
    operation: ops.CreateModel,
    *,
    base_model: str,
    user_metadata: dict[str, Json] | None,
) -> wire.Submitted:
    """Create the run and submit its seq_id 0."""
    context.settings.model(base_model)  # raises UserError if it is not served
    refuse_ended(session)
    capabilities = await context.engines.capabilities(base_model)
    if capabilities is not None:
        check_operation(operation, capabilities, context.losses)
    now = context.now()
    run = RunRecord(
        model_id=operation.model_id,
        session_id=session.session_id,
        tenant=caller.tenant,
        base_model=base_model,
        lora=operation.lora,
        created_at=now,
        last_request_at=now,
        user_metadata=user_metadata or None,
        next_seq_id=WAITS_FOR_PLACE,
    )
    creation = traced(new_training_operation(KnownRun.of(run), 0, operation))
    await context.quotas.admit_model(caller.tenant, described_bytes(run.user_metadata))
    await context.quotas.admit_operation(creation)
    request_id = await context.store.create_run(run, creation)
    accepted(context, creation, request_id)
    return wire.Submitted(request_id=request_id, model_id=run.model_id)


@router.post("/get_info")
async def get_info(body: wire.ModelRequest, caller: Caller, context: Context) -> wire.ModelInfo:
    run = await readable_run(context, caller, body.model_id)
    tokenizer = context.tokenizer_of(run.base_model)
    return wire.ModelInfo(
        model_id=run.model_id,
        model_data=wire.ModelData(model_name=run.base_model, tokenizer_id=tokenizer),
        is_lora=run.lora.rank > 0,
        lora_rank=run.lora.rank,
        model_name=run.base_model,
    )


@router.post("/unload_model", response_model_exclude_none=True)
async def unload_model(body: wire.ModelRequest, caller: Caller, context: Context) -> wire.Submitted:
    """Free a model's place before its session ends. Its accepted operations run first."""
    run = await own_known_run(context, caller, body.model_id)
    request_id = await context.store.unload_run(run.model_id)
    context.requests.note(request_id, KnownOwner(run.tenant))
    return wire.Submitted(request_id=request_id, model_id=run.model_id)


@router.post("/forward_backward", response_model_exclude_none=True)
async def forward_backward(request: Request, caller: Caller, context: Context) -> wire.Submitted:
    """The body is `ForwardBackwardRequest`: protobuf, as the SDK sends it, or JSON."""
    body = await _in_protobuf(request, caller, context)
    parsed = await context.heavy.run(caller.tenant, _WORK_PER_BYTE * len(body), partial(training_request.parse, body))
    run = await own_known_run(context, caller, parsed.head.model_id)
    num_bytes = max(_WORK_PER_BYTE * len(body), len(body) + _SPARSE_ELEMENT_BYTES * parsed.sparse_elements)
    decode = partial(translate.forward_backward, parsed, context.stand_in)
    stand_in = context.stand_in if parsed.head.loss_fn == stable_reinforce.NAME else None
    problem = None
    if stand_in is not None:
        check = partial(context.sequence_ids.problem, parsed, run.tenant, context.now())
        problem = await context.heavy.run(caller.tenant, _WORK_PER_BYTE * len(body), check)
    submitted = await submit_decoded(context, run, parsed.head.seq_id, decode, body_bytes=num_bytes, problem=problem)
    if stand_in is not None:
        names = {"loss_fn": stable_reinforce.NAME, "stand_in": stand_in.loss.name}
        context.metrics.stand_ins.labels(base_model=run.base_model, **names).inc()
    return submitted


async def _in_protobuf(request: Request, caller: Principal, context: ServerContext) -> bytes:
    body, given = await request.body(), request.headers.get("content-type", "")
    if given.startswith(PROTOBUF):
        return body
    if not is_json(given):
        msg = f"content-type {given[:100]!r} is not offered for forward_backward; send {PROTOBUF} or {JSON}"
        raise MediaTypeError(msg, offered=f"{PROTOBUF}, {JSON}")

    def converted() -> bytes:
        return json_passes.as_protobuf(strictly_read(body, wire.ForwardBackwardRequest))

    message = await context.heavy.run(caller.tenant, _WORK_PER_BYTE * len(body), converted)
    await hold_decoded(request, caller.tenant, len(message))
    return message


@router.post("/optim_step", response_model_exclude_none=True)
async def optim_step(body: wire.OptimStepRequest, caller: Caller, context: Context) -> wire.Submitted:
    run = await own_known_run(context, caller, body.model_id)
    return await submit_training(context, run, body.seq_id, translate.optim_step(body))
