"""Sampling sessions and samples. Samples have no order among each other."""

import secrets
from functools import partial

from fastapi import APIRouter, Request

from tinsmith.errors import UnsupportedError
from tinsmith.protocol import translate, wire
from tinsmith.server.auth import Caller, own_session, readable_sampler, usable_sampler
from tinsmith.server.context import API_PREFIX, Context
from tinsmith.server.json_routes import JsonRoute
from tinsmith.server.limits.body_budget import hold_decoded
from tinsmith.server.routes.sessions import refuse_ended
from tinsmith.server.sampling_sessions import open_sampling_session
from tinsmith.server.submitting import submit_sample
from tinsmith.store import SEQ_IDS_PER_CLONE

router = APIRouter(prefix=API_PREFIX, tags=["sampling"], route_class=JsonRoute)

_MAX_CLIENT_COUNTER = 2**63 // SEQ_IDS_PER_CLONE  # the SDK numbers a clone's samples from there on, in an int64


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
    sequences = [f"{request_id}:{index}" for index in range(body.num_samples)]
    return wire.Submitted(request_id=request_id, sample_sequence_ids=sequences)
