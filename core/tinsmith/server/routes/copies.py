"""Copies of checkpoints, which outlive them. Files are shared where the file system can, and count in full for quotas.

A copy belongs to a model that cannot be trained on: in a new session, which has ended, or in one of the caller's.
"""

import asyncio
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import Annotated, Final

from fastapi import APIRouter, Header

from tinsmith.checkpoints import saved as checkpoints
from tinsmith.checkpoints.tinker_path import TinkerPath
from tinsmith.errors import UnsupportedError, UserError
from tinsmith.hook_values import Principal
from tinsmith.protocol import bounds, translate, wire
from tinsmith.server.auth import Caller, own_session, readable_checkpoint
from tinsmith.server.context import API_PREFIX, Context, ServerContext
from tinsmith.server.held_checkpoints import ended_session, hold, holder
from tinsmith.server.json_routes import JsonRoute
from tinsmith.server.routes.sessions import refuse_ended
from tinsmith.store import CheckpointRecord, RunRecord

router = APIRouter(prefix=API_PREFIX, tags=["weights"], route_class=JsonRoute)

_KEY: Final = "copy_weights:"  # before idempotency keys, so that no other session has the same


@router.post("/copy_weights")
async def copy_weights(
    body: wire.CopyWeightsRequest,
    caller: Caller,
    context: Context,
    x_idempotency_key: Annotated[str | None, Header(max_length=bounds.MAX_NAME_CHARS)] = None,
    x_tinker_weights_access_token: Annotated[str | None, Header()] = None,
) -> wire.CopiedWeights:
    if body.weights_access_token is not None or x_tinker_weights_access_token is not None:
        msg = "weights_access_token is not offered; publish the checkpoint instead, and anyone with a key can copy it"
        raise UnsupportedError(msg)
    ttl_s = translate.checked_ttl(body.ttl_seconds)
    source = await readable_checkpoint(context, caller, str(TinkerPath.parse(body.source_path)))
    run = await _holder(context, caller, body, source, x_idempotency_key)
    original = TinkerPath.parse(source.path)
    path = TinkerPath(model_id=run.model_id, kind=original.kind, name=original.name)
    copy = replace(
        source,
        path=str(path),
        model_id=run.model_id,
        tenant=caller.tenant,
        created_at=context.now(),
        directory=path.new_directory(),
        public=False,
        expires_at=None if ttl_s is None else context.now() + timedelta(seconds=ttl_s),
    )
    link = partial(checkpoints.copy_checkpoint, context.checkpoint_root, source.directory, copy.directory)
    await hold(context, copy, partial(asyncio.to_thread, link))
    return wire.CopiedWeights(tinker_path=copy.path)


async def _holder(
    context: ServerContext, caller: Principal, body: wire.CopyWeightsRequest, source: CheckpointRecord, key: str | None
) -> RunRecord:
    """Return the model to which the copy belongs: for a repeated request, the same one."""
    match body.session_id, body.model_seq_id, body.destination_project_id:
        case str(session_id), int(number), None:
            session = await own_session(context, caller, session_id)
            refuse_ended(session)
        case None, None, str(project_id):
            session, number = (
                await ended_session(
                    context,
                    caller,
                    project_id=project_id,
                    detail="made for a copy of a checkpoint",
                    idempotency_key=None if key is None else _KEY + key,
                ),
                0,
            )
        case _:
            msg = "send either destination_project_id, for a new session, or session_id and model_seq_id"
            raise UserError(msg)
    return await holder(
        context,
        session,
        number,
        base_model=source.base_model,
        lora=source.lora,
        holds=f"a copy of {source.path!r}",
        copied=source,
    )
