"""Training runs and their checkpoints, as the REST client and the `tinker` command line see them."""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import datetime, timedelta
from functools import partial
from typing import Annotated, Final

from fastapi import APIRouter, Query
from fastapi.responses import Response

from tinsmith.checkpoints import saved as checkpoints
from tinsmith.checkpoints.tinker_path import TinkerPath
from tinsmith.errors import NotFoundError
from tinsmith.hook_values import Principal
from tinsmith.protocol import translate, wire
from tinsmith.server.auth import (
    AccessScope,
    Actor,
    Caller,
    own_checkpoint,
    own_deleted_checkpoint,
    own_run,
    readable_run,
    visible_tenant,
)
from tinsmith.server.context import API_PREFIX, Context, ServerContext
from tinsmith.server.json_routes import JsonRoute
from tinsmith.server.routes.sessions import Limit, Offset, runs_of
from tinsmith.store import CheckpointKind, CheckpointRecord, RunRecord, RunState

router = APIRouter(prefix=API_PREFIX, tags=["runs and checkpoints"], route_class=JsonRoute)

_PAGE = 500
_MOST_CHECKPOINTS: Final = 10_000


@router.get("/training_runs", response_model_exclude_none=True)
async def list_training_runs(
    caller: Caller,
    context: Context,
    limit: Limit = 20,
    offset: Offset = 0,
    project_id: str | None = None,
    access_scope: AccessScope = "owned",
) -> wire.TrainingRunList:
    tenant = visible_tenant(caller, access_scope)
    if project_id is None:
        runs, total = await context.store.list_runs(tenant, limit=limit, offset=offset)
    else:
        of_project = await _runs_of_project(context, tenant, project_id)
        runs, total = of_project[offset : offset + limit], len(of_project)
    return wire.TrainingRunList(
        training_runs=await _training_runs(context, runs),
        cursor=wire.Cursor(offset=offset, limit=limit, total_count=total),
    )


async def _runs_of_project(context: ServerContext, tenant: str | None, project_id: str) -> list[RunRecord]:
    """Walk all sessions. Projects are labels of sessions, and few clients ask for them."""
    found: list[RunRecord] = []
    offset = 0
    while sessions := await context.store.list_sessions(tenant, limit=_PAGE, offset=offset):
        for session in sessions:
            if session.project_id == project_id:
                found.extend(await runs_of(context, session))
        offset += len(sessions)
    return sorted(found, key=lambda run: run.created_at, reverse=True)


@router.get("/training_runs/{model_id}", response_model_exclude_none=True)
async def get_training_run(
    model_id: str, caller: Caller, context: Context, access_scope: AccessScope = "accessible"
) -> wire.TrainingRun:
    find = own_run if access_scope == "owned" else readable_run
    (run,) = await _training_runs(context, [await find(context, caller, model_id)])
    return run


async def _training_runs(context: ServerContext, runs: Sequence[RunRecord]) -> list[wire.TrainingRun]:
    newest = await context.store.newest_checkpoints([run.model_id for run in runs])
    saved = {(record.model_id, record.kind): described(record) for record in newest}
    return [_training_run(run, saved) for run in runs]


def _training_run(run: RunRecord, newest: Mapping[tuple[str, CheckpointKind], wire.Checkpoint]) -> wire.TrainingRun:
    return wire.TrainingRun(
        training_run_id=run.model_id,
        base_model=run.base_model,
        model_owner=run.tenant,
        corrupted=run.state is RunState.LOST,
        state=run.state.value,
        state_reason=run.state_reason,
        is_lora=run.lora.rank > 0,
        lora_rank=run.lora.rank,
        last_request_time=run.last_request_at,
        last_checkpoint=newest.get((run.model_id, "training")),
        last_sampler_checkpoint=newest.get((run.model_id, "sampler")),
        user_metadata=wire.as_text(run.user_metadata),
    )


def described(record: CheckpointRecord) -> wire.Checkpoint:
    return wire.Checkpoint(
        checkpoint_id=TinkerPath.parse(record.path).checkpoint_id,
        checkpoint_type=record.kind,
        time=record.created_at,
        tinker_path=record.path,
        size_bytes=record.size_bytes,
        public=record.public,
        user_metadata=dict(record.user_metadata) or None,
        expires_at=record.expires_at,
        base_model=record.base_model,
    )


@router.get(
    "/training_runs/{model_id}/checkpoints", response_model=wire.CheckpointList, response_model_exclude_none=True
)
async def list_run_checkpoints(
    model_id: str,
    caller: Caller,
    context: Context,
    limit: Annotated[int, Query(ge=1, le=_MOST_CHECKPOINTS)] = _MOST_CHECKPOINTS,
    offset: Offset = 0,
) -> Response:
    """List them newest first, at most 10,000 at a time, also without a limit; `cursor.total_count` is how many exist.

    The SDK asks for all of them at once, and ignores the cursor.
    """
    run = await readable_run(context, caller, model_id)
    read = partial(context.store.list_checkpoints, run.tenant, model_id=model_id, limit=limit, offset=offset)
    return await context.large_answers.build(caller.tenant, read, partial(_listed, offset, limit))


@router.get("/checkpoints", response_model_exclude_none=True)
async def list_checkpoints(
    caller: Caller, context: Context, limit: Limit = 100, offset: Offset = 0
) -> wire.CheckpointList:
    return _listed(offset, limit, await context.store.list_checkpoints(caller.tenant, limit=limit, offset=offset))


def _listed(offset: int, limit: int, page: tuple[Sequence[CheckpointRecord], int]) -> wire.CheckpointList:
    saved, total = page
    cursor = wire.Cursor(offset=offset, limit=limit, total_count=total)
    return wire.CheckpointList(checkpoints=[described(record) for record in saved], cursor=cursor)


# One checkpoint. Its id holds a slash, so the routes with a suffix come before the bare one ---------------------------

CHECKPOINT: Final = "/training_runs/{model_id}/checkpoints/{kind}/{name}"


def path_of(model_id: str, kind: str, name: str) -> str:
    return str(TinkerPath.parse(f"tinker://{model_id}/{kind}/{name}"))


@router.post(CHECKPOINT + "/publish")
async def publish(
    model_id: str, kind: str, name: str, caller: Caller, actor: Actor, context: Context
) -> dict[str, bool]:
    return await _set_public(context, caller, actor, path_of(model_id, kind, name), public=True)


@router.delete(CHECKPOINT + "/publish")
async def unpublish(
    model_id: str, kind: str, name: str, caller: Caller, actor: Actor, context: Context
) -> dict[str, bool]:
    return await _set_public(context, caller, actor, path_of(model_id, kind, name), public=False)


async def _set_public(
    context: ServerContext, caller: Principal, actor: dict[str, str], path: str, *, public: bool
) -> dict[str, bool]:
    """Do nothing if it is so already: a 409 would make the SDK repeat the request silently for five minutes."""
    await own_checkpoint(context, caller, path)
    await context.store.update_checkpoint(path, lambda record: replace(record, public=public), by=actor)
    return {"public": public}


@router.put(CHECKPOINT + "/ttl")
async def set_ttl(
    model_id: str, kind: str, name: str, body: wire.TtlRequest, caller: Caller, actor: Actor, context: Context
) -> dict[str, datetime | None]:
    path = path_of(model_id, kind, name)
    await own_checkpoint(context, caller, path)
    ttl_s = translate.checked_ttl(body.ttl_seconds)
    expires_at = None if ttl_s is None else context.now() + timedelta(seconds=ttl_s)
    await context.store.update_checkpoint(path, lambda record: replace(record, expires_at=expires_at), by=actor)
    return {"expires_at": expires_at}


@router.delete(CHECKPOINT)
async def delete_checkpoint(
    model_id: str, kind: str, name: str, caller: Caller, actor: Actor, context: Context
) -> dict[str, str]:
    """Delete it, again if asked again: the first answer may have been lost, and files may have been left behind.

    If a save replaces it meanwhile, the new version stays: it is as if the deletion had come just before.
    """
    path = path_of(model_id, kind, name)
    record = await _deleted(context, caller, actor, path)
    await asyncio.to_thread(checkpoints.delete_checkpoint, context.checkpoint_root, record.directory)
    context.quotas.disk.freed(record.tenant)
    return {"deleted": path}


async def _deleted(context: ServerContext, caller: Principal, actor: dict[str, str], path: str) -> CheckpointRecord:
    """Delete the version that is there now. Return it, or the one that was deleted before."""
    read: CheckpointRecord | None = None
    while True:
        try:
            found = await own_checkpoint(context, caller, path)
        except NotFoundError:
            return await own_deleted_checkpoint(context, caller, path)
        if read is not None and found.directory != read.directory:
            return read  # replaced meanwhile
        try:
            return await context.store.delete_version(found, by=actor)
        except NotFoundError:
            read = found  # its expiry time was changed meanwhile, or it was replaced or deleted
