"""Sampling sessions and samples. Samples have no order among each other."""

import secrets
from functools import partial

from fastapi import APIRouter, Request

from tinsmith.checkpoints.tinker_path import TinkerPath
from tinsmith.errors import CapacityError, NotFoundError, UnsupportedError, UserError
from tinsmith.hook_values import Principal
from tinsmith.protocol import translate, wire
from tinsmith.server.auth import (
    Caller,
    own_session,
    readable_checkpoint,
    readable_sampler,
    refuse_export,
    usable_sampler,
)
from tinsmith.server.context import API_PREFIX, Context, ServerContext
from tinsmith.server.json_routes import JsonRoute
from tinsmith.server.limits.body_budget import hold_decoded
from tinsmith.server.model_names import base_of
from tinsmith.server.routes.sessions import refuse_ended
from tinsmith.server.submitting import submit_sample
from tinsmith.store import FinishedSample, SamplingSessionRecord
from tinsmith.store.refusals import taken

router = APIRouter(prefix=API_PREFIX, tags=["sampling"], route_class=JsonRoute)

# The SDK numbers a clone's samples from a multiple of SEQ_IDS_PER_CLONE on, in an int64.
_MAX_CLIENT_COUNTER = 2**63 // FinishedSample.SEQ_IDS_PER_CLONE


@router.post("/create_sampling_session")
async def create_sampling_session(
    body: wire.CreateSamplingSessionRequest, caller: Caller, context: Context
) -> wire.SamplingSessionCreated:
    refuse_ended(await own_session(context, caller, body.session_id))
    sampler = await open_sampling_session(
        context,
        caller,
        session_id=body.session_id,
        number=body.sampling_session_seq_id,
        base_model=body.base_model,
        model_path=body.model_path,
    )
    return wire.SamplingSessionCreated(sampling_session_id=sampler.sampling_session_id)


@router.get("/samplers/{sampler_id}", response_model_exclude_none=True)
async def get_sampling_session(sampler_id: str, caller: Caller, context: Context) -> wire.Sampler:
    sampler = await readable_sampler(context, caller, sampler_id)
    return wire.Sampler(
        sampler_id=sampler.sampling_session_id, base_model=sampler.base_model, model_path=sampler.model_path
    )


@router.post("/join_sampling_session")
async def join_sampling_session(
    body: wire.SamplingSessionRequest, caller: Caller, context: Context
) -> wire.SamplingSessionJoined:
    """Draw the number at random: of 9 * 10**9, two clones practically never get the same, whatever server they ask."""
    await usable_sampler(context, caller, body.sampling_session_id)
    return wire.SamplingSessionJoined(client_counter=1 + secrets.randbelow(_MAX_CLIENT_COUNTER - 1))


@router.post("/asample", response_model_exclude_none=True)
async def asample(request: Request, body: wire.SampleRequest, caller: Caller, context: Context) -> wire.Submitted:
    """Submit a sample. It is refused with an HTTP error, because samples have no order and nothing waits behind one."""
    if body.sampling_session_id is None or body.seq_id is None:
        msg = "sampling_session_id and seq_id are required; create a sampling session for base_model or model_path"
        raise UnsupportedError(msg)
    for name, value in (("base_model", body.base_model), ("model_path", body.model_path)):
        if value is not None:
            msg = f"{name} is not allowed in asample; the sampling session determines it"
            raise UnsupportedError(msg)
    sampler = await usable_sampler(context, caller, body.sampling_session_id)
    refuse_ended(await context.store.get_session(sampler.session_id))
    capabilities = await context.engines.capabilities(sampler.base_model)
    translate.check_targets(body)  # before `num_bytes` goes by their shape
    await hold_decoded(request, caller.tenant, body.num_bytes)
    decode = partial(
        translate.sample,
        body,
        sampling_session=sampler.sampling_session_id,
        snapshot_id=sampler.snapshot_id,
        max_context_tokens=None if capabilities is None else capabilities.trainer.max_context_tokens,
        stand_in=context.stand_in,
    )
    request_id = await submit_sample(context, sampler, body.seq_id, decode, body_bytes=body.num_bytes)
    recorded = sum(len(chunk.tokens) for chunk in body.prompt.chunks) if body.record_stability_info else None
    ids = context.sequence_ids.of_sample(sampler.tenant, request_id, body.num_samples, recorded_prompt=recorded)
    return wire.Submitted(request_id=request_id, sample_sequence_ids=ids)


async def open_sampling_session(
    context: ServerContext,
    caller: Principal,
    *,
    session_id: str,
    number: int,
    base_model: str | None,
    model_path: str | None,
) -> SamplingSessionRecord:
    """Open one in the caller's session, or return the one that has this number there.

    Raises UserError if it cannot be opened, ConflictError if the number is taken by something else, CapacityError if
    the tenant has too many.
    """
    path = None if model_path is None else _sampler_path(model_path)
    if path is None and base_model is None:
        msg = "base_model and model_path are both missing; send one of them"
        raise UserError(msg)
    base_model = None if base_model is None else await base_of(context, base_model)
    checkpoint = None if path is None else await readable_checkpoint(context, caller, str(path), base_model=base_model)
    if checkpoint is not None:
        await refuse_export(context, checkpoint)
    name = base_model or "" if checkpoint is None else checkpoint.base_model
    context.settings.model(name)  # raises UserError if it is not served
    wanted = SamplingSessionRecord(
        sampling_session_id=translate.sampling_session_id(session_id, number),
        session_id=session_id,
        tenant=caller.tenant,
        base_model=name,
        created_at=context.now(),
        snapshot_id=None if path is None else str(path),
        model_path=None if path is None else str(path),
        model_id=None if path is None else path.model_id,
        checkpoint_created_at=None if checkpoint is None else checkpoint.created_at,
        only_while_public=checkpoint is not None and checkpoint.tenant != caller.tenant and not caller.admin,
    )
    await _admit(context, wanted)
    sampler = await context.store.create_sampling_session(wanted)
    _refuse_other_content(sampler, wanted)
    return sampler


async def _admit(context: ServerContext, wanted: SamplingSessionRecord) -> None:
    """A repeat needs no room. Raises CapacityError if the tenant has too many."""
    try:
        await context.quotas.admit_sampling_session(wanted.tenant)
    except CapacityError:
        try:
            await context.store.get_sampling_session(wanted.sampling_session_id)
        except NotFoundError:
            pass
        else:
            return
        raise


def _refuse_other_content(first: SamplingSessionRecord, wanted: SamplingSessionRecord) -> None:
    """A number names one sampling session for ever. Raises ConflictError if it was used for something else."""
    if (first.base_model, first.snapshot_id) != (wanted.base_model, wanted.snapshot_id):
        raise taken(first.sampling_session_id, first.snapshot_id or first.base_model)


def _sampler_path(text: str) -> TinkerPath:
    path = TinkerPath.parse(text)
    if path.kind == "training":
        msg = (
            f"model_path {text!r} is not a sampler checkpoint; pass the path that save_weights_for_sampler returned "
            "(tinker://.../sampler_weights/...)"
        )
        raise UserError(msg)
    return path
