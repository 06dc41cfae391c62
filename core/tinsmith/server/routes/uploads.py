"""Uploads of PEFT adapters: start, put each file by a signed link, finish. The result can be loaded and sampled."""

import asyncio
import re
from collections.abc import Mapping
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Annotated, Final

from fastapi import APIRouter, Header, Request, Response

from tinsmith.checkpoints import importing, uploads
from tinsmith.checkpoints.saved import write_checkpoint
from tinsmith.checkpoints.tinker_path import TinkerPath
from tinsmith.errors import AuthenticationError, UnsupportedError, UserError
from tinsmith.operations import LoraConfig
from tinsmith.protocol import wire
from tinsmith.server.auth import Caller
from tinsmith.server.context import API_PREFIX, Context, ServerContext
from tinsmith.server.held_checkpoints import ended_session, hold, holder
from tinsmith.server.json_routes import JsonRoute
from tinsmith.server.model_names import base_of
from tinsmith.server.routes.downloads import base_url
from tinsmith.server.signed_urls import Grant
from tinsmith.store import CheckpointRecord
from tinsmith_checkpoints.sizes import size_of

router = APIRouter(prefix=API_PREFIX, tags=["weights"], route_class=JsonRoute)
open_router = APIRouter(prefix=API_PREFIX, tags=["weights"])

UPLOADS: Final = "uploads"
_LIFETIME: Final = timedelta(hours=1)
_HEADER_BYTES: Final = 16 << 20  # what a file may have beside its tensors
_STEP_BYTES: Final = 1 << 20
_NAME: Final = "uploaded"
_VERSION: Final = re.compile(r"(\d+)\.(\d+)")


class UploadTooLargeError(UserError):
    http_status = 413


@router.post("/external_weights_upload_start")
async def start_upload(
    body: wire.UploadStartRequest,
    request: Request,
    caller: Caller,
    context: Context,
    x_sdk_version: Annotated[str, Header()] = "",
    x_stainless_package_version: Annotated[str, Header()] = "",
) -> wire.UploadStarted:
    lora, base_model = _announced_lora(body.lora_config), await base_of(context, body.base_model)
    base_path = _base_path(context, base_model)
    if (why := await context.quotas.why_no_checkpoint(caller.tenant)) is not None:
        raise why
    now = context.now()
    announced = uploads.Announced(
        tenant=caller.tenant,
        base_model=base_model,
        lora=lora,
        project_id=body.destination_project_id,
        created_at=now,
        expires_at=now + _LIFETIME,
        max_bytes=_HEADER_BYTES + await asyncio.to_thread(importing.largest_adapter_bytes, lora, base_path),
    )
    root = context.settings.data_dir.uploads
    upload_id = await asyncio.to_thread(uploads.begin, root, announced)
    key_id = context.api_keys.made_with(caller, request.headers)
    grant = Grant(created_at=now, only_while_public=False, key_id=key_id)
    urls = {}
    for file in uploads.FILES:
        name = uploads.link_name(caller.tenant, upload_id, file)
        signed = context.signer.url_path(name, announced.expires_at, grant)
        urls[file] = f"{base_url(context, request)}{API_PREFIX}/{UPLOADS}/{signed}"
    return wire.UploadStarted(
        upload_id=upload_id,
        urls=urls if _takes_text(x_sdk_version or x_stainless_package_version) else _with_headers(urls),
        expires=announced.expires_at,
    )


def _takes_text(sdk_version: str) -> bool:
    """SDK 0.39 takes a URL for each file, and later ones an object with the headers that the PUT must have."""
    found = _VERSION.match(sdk_version)
    return found is not None and (int(found[1]), int(found[2])) < (0, 40)


def _with_headers(urls: Mapping[str, str]) -> dict[str, wire.UploadUrl]:
    return {file: wire.UploadUrl(url=url) for file, url in urls.items()}


def _announced_lora(given: wire.LoraConfig) -> LoraConfig:
    if given.rank < 1:
        msg = f"lora_config.rank is {given.rank}; an adapter has a rank of at least 1"
        raise UserError(msg)
    lora = LoraConfig(
        rank=given.rank,
        seed=given.seed or 0,
        train_attn=given.train_attn,
        train_mlp=given.train_mlp,
        train_unembed=given.train_unembed,
    )
    if not (lora.train_attn or lora.train_mlp or lora.train_unembed):
        msg = "lora_config leaves out all modules; set train_attn, train_mlp or train_unembed"
        raise UserError(msg)
    return lora


def _base_path(context: ServerContext, base_model: str) -> Path:
    model = context.settings.model(base_model)  # raises UserError if it is not served
    found = model.path or context.plugins.resolve_base_model(model.source)
    if found is None:
        msg = (
            f"this server has no directory of {base_model!r} to compare an adapter with; set models[].path to one, "
            "or import the adapter with `tinsmith checkpoint import`"
        )
        raise UnsupportedError(msg)
    return found.expanduser().absolute()


@open_router.put(f"/{UPLOADS}/{{stamp}}/{{grant}}/{{signature}}/{{name:path}}", status_code=204)
async def put_file(stamp: int, grant: str, signature: str, name: str, request: Request, context: Context) -> Response:
    """Take a file. The signature replaces the key. Nothing else has read the body: it goes to the disk as it comes."""
    given = context.signer.check(name, stamp, grant, signature, context.now())
    file, announced = await asyncio.to_thread(uploads.linked, context.settings.data_dir.uploads, name)
    if announced.path is not None:
        msg = f"the upload is finished, as {announced.path!r}; start another one"
        raise UserError(msg)
    await _refuse_removed_key(context, given, announced.tenant)
    size = int(request.headers.get("content-length", "0"))
    _expect_size(file.name, size, announced.max_bytes)
    if (why := await context.quotas.disk.why_no_save(announced.tenant, max(size, 1))) is not None:
        raise why
    with context.quotas.in_progress(announced.tenant, polls=False), uploads.receiving(file) as received:
        part, size = bytearray(), 0
        async for chunk in request.stream():
            part += chunk
            size += len(chunk)
            _expect_size(file.name, size, announced.max_bytes)
            if len(part) >= _STEP_BYTES:
                await asyncio.to_thread(received.write, bytes(part))
                part.clear()
        await asyncio.to_thread(received.write, bytes(part))
    return Response(status_code=204)


async def _refuse_removed_key(context: ServerContext, given: Grant, tenant: str) -> None:
    owner = await context.api_keys.look_up_owner(given.key_id)  # raises if it was removed
    if owner is not None and owner.tenant != tenant:
        msg = "the API key with which this upload was started is another tenant's now"
        raise AuthenticationError(msg)


def _expect_size(name: str, size: int, largest: int) -> None:
    if size > largest:
        msg = f"{name} is over {largest} bytes, the most that an adapter of this rank can have for this base model"
        raise UploadTooLargeError(msg)


@router.post("/external_weights_upload_finish")
async def finish_upload(body: wire.UploadFinishRequest, caller: Caller, context: Context) -> wire.CopiedWeights:
    root = context.settings.data_dir.uploads
    directory, announced = await asyncio.to_thread(uploads.find, root, caller.tenant, body.upload_id)
    if announced.path is not None:
        return wire.CopiedWeights(tinker_path=announced.path)
    if missing := [name for name in uploads.FILES if not (directory / name).is_file()]:
        msg = f"upload {body.upload_id!r} has no {' and no '.join(missing)} yet; put each file to its URL first"
        raise UserError(msg)
    base_path = _base_path(context, announced.base_model)
    state = await asyncio.to_thread(importing.announced_adapter, directory, announced.lora, base_path)
    session = await ended_session(
        context,
        caller,
        project_id=announced.project_id,
        detail="made for an uploaded adapter",
        idempotency_key=f"upload:{body.upload_id}",
    )
    run = await holder(
        context, session, 0, base_model=announced.base_model, lora=state.lora, holds="an uploaded adapter"
    )
    path = TinkerPath(model_id=run.model_id, kind="external", name=_NAME)
    record = CheckpointRecord(
        path=str(path),
        model_id=run.model_id,
        tenant=caller.tenant,
        kind="external",
        base_model=announced.base_model,
        lora=state.lora,
        created_at=context.now(),
        size_bytes=size_of(state, "training"),
        directory=path.new_directory(),
    )
    write = partial(
        write_checkpoint,
        context.checkpoint_root,
        record.directory,
        kind="training",  # so that it can be loaded; its files are those of an export as well
        state=state,
        base_model=announced.base_model,
        user_metadata={},
        created_at=record.created_at,
        overwrite=False,
        beside_others=True,
        model_path=base_path,
    )
    held = await hold(context, record, partial(asyncio.to_thread, write))
    await asyncio.to_thread(uploads.finish, directory, announced, held.path)
    return wire.CopiedWeights(tinker_path=held.path)
