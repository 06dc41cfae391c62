"""Saving, loading and exporting a model's weights."""

from dataclasses import replace

from fastapi import APIRouter

from tinsmith import operations as ops
from tinsmith.checkpoints.tinker_path import TinkerPath
from tinsmith.errors import NotFoundError, UserError
from tinsmith.hook_values import Principal
from tinsmith.protocol import translate, wire
from tinsmith.server.auth import (
    Caller,
    own_known_run,
    own_session,
    read_right,
    readable_checkpoint,
    refuse_export,
)
from tinsmith.server.context import API_PREFIX, Context, ServerContext
from tinsmith.server.kept import KnownRun
from tinsmith.server.model_names import base_of
from tinsmith.server.refusals import NumberedRoute
from tinsmith.server.routes.training import submit_creation
from tinsmith.server.submitting import submit_training
from tinsmith.store import CheckpointRecord
from tinsmith.store.refusals import taken

router = APIRouter(prefix=API_PREFIX, tags=["weights"], route_class=NumberedRoute)


@router.post("/save_weights", response_model_exclude_none=True)
async def save_weights(body: wire.SaveWeightsRequest, caller: Caller, context: Context) -> wire.Submitted:
    run = await own_known_run(context, caller, body.model_id)
    operation = translate.save_weights(body)
    return await submit_training(
        context, run, body.seq_id, operation, problem=await context.quotas.why_no_checkpoint(caller.tenant)
    )


@router.post("/save_weights_for_sampler", response_model_exclude_none=True)
async def save_weights_for_sampler(
    body: wire.SaveWeightsForSamplerRequest, caller: Caller, context: Context
) -> wire.Submitted:
    run = await own_known_run(context, caller, body.model_id)
    operation = translate.save_weights_for_sampler(body, run.session_id)
    if operation.path is not None:
        problem = await context.quotas.why_no_checkpoint(caller.tenant)
    else:
        problem = await _why_taken(context, operation.sampling_session_id)
        problem = problem or await context.quotas.why_no_sampling_session(caller.tenant)
    return await submit_training(context, run, body.seq_id, operation, problem=problem)


async def _why_taken(context: ServerContext, sampling_session_id: str | None) -> UserError | None:
    """Return why the id cannot be used. A repeat of the request that used it gets its first answer all the same."""
    if sampling_session_id is None:
        return None
    try:
        first = await context.store.get_sampling_session(sampling_session_id)
    except NotFoundError:
        return None
    return taken(sampling_session_id, first.snapshot_id or first.base_model)


@router.post("/save_weights_external", response_model_exclude_none=True)
async def save_weights_external(
    body: wire.SaveWeightsExternalRequest, caller: Caller, context: Context
) -> wire.Submitted:
    run = await own_known_run(context, caller, body.model_id)
    operation = translate.save_weights_external(body)
    return await submit_training(
        context, run, body.seq_id, operation, problem=await context.quotas.why_no_checkpoint(caller.tenant)
    )


@router.post("/load_weights", response_model_exclude_none=True)
async def load_weights(body: wire.LoadWeightsRequest, caller: Caller, context: Context) -> wire.Submitted:
    match body.session_id, body.model_seq_id, body.model_id, body.seq_id:
        case str(session_id), int(model_seq_id), None, None:
            return await _create_from_checkpoint(context, caller, body, session_id, model_seq_id)
        case None, None, str(model_id), int(seq_id):
            return await _load_into(context, caller, body, model_id, seq_id)
    msg = "send either session_id and model_seq_id, for a new model, or model_id and seq_id, for an existing one"
    raise UserError(msg)


async def _load_into(
    context: ServerContext, caller: Principal, body: wire.LoadWeightsRequest, model_id: str, seq_id: int
) -> wire.Submitted:
    run = await own_known_run(context, caller, model_id)
    operation, problem = translate.load_weights(body), None
    try:
        operation = replace(operation, right=await _right_to_load(context, caller, body.path, run))
    except UserError as error:
        problem = error
    return await submit_training(context, run, seq_id, operation, problem=problem)


async def _create_from_checkpoint(
    context: ServerContext, caller: Principal, body: wire.LoadWeightsRequest, session_id: str, model_seq_id: int
) -> wire.Submitted:
    """Create a model with the LoRA settings of the checkpoint, without a create_model request."""
    session = await own_session(context, caller, session_id)
    translate.check_load(body)
    base_model = None if body.base_model is None else await base_of(context, body.base_model)
    checkpoint = await readable_checkpoint(context, caller, body.path, base_model=base_model)
    await refuse_export(context, checkpoint)
    operation = ops.CreateModel(
        model_id=translate.model_id(session_id, model_seq_id),
        lora=checkpoint.lora,
        checkpoint=body.path,
        load_optimizer=body.optimizer,
        right=read_right(checkpoint, caller),
    )
    return await submit_creation(
        context, caller, session, operation, base_model=checkpoint.base_model, user_metadata=body.user_metadata
    )


async def _right_to_load(context: ServerContext, caller: Principal, path: str, run: KnownRun) -> ops.ReadRight:
    """Raises UserError if the checkpoint may not or cannot be loaded.

    A checkpoint of the model itself is left to the engine: a request that is still queued may write it.
    """
    if TinkerPath.parse(path).model_id == run.model_id:
        return ops.ReadRight()
    checkpoint = await readable_checkpoint(context, caller, path)
    await refuse_export(context, checkpoint)
    if checkpoint.base_model != run.base_model:
        msg = f"{path!r} is a checkpoint of {checkpoint.base_model!r}, but this model is of {run.base_model!r}"
        raise UserError(msg)
    return read_right(checkpoint, caller)


@router.post("/weights_info")
async def weights_info(body: wire.WeightsInfoRequest, caller: Caller, context: Context) -> wire.WeightsInfo:
    checkpoint: CheckpointRecord = await readable_checkpoint(context, caller, str(TinkerPath.parse(body.tinker_path)))
    lora = checkpoint.lora
    return wire.WeightsInfo(
        base_model=checkpoint.base_model,
        is_lora=lora.rank > 0,
        lora_rank=lora.rank,
        train_unembed=lora.train_unembed,
        train_mlp=lora.train_mlp,
        train_attn=lora.train_attn,
    )
