"""Downloads of checkpoints, by links that work without a key: the SDK fetches them with plain urllib.

Every download, on every server, checks whether the facts behind its link still hold.
"""

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import ExitStack
from datetime import timedelta
from typing import Annotated, Final

from fastapi import APIRouter, Depends, Request
from fastapi.responses import FileResponse, Response, StreamingResponse

from tinsmith.checkpoints import saved as checkpoints
from tinsmith.checkpoints.tinker_path import TinkerPath
from tinsmith.errors import AuthenticationError, NotFoundError, RevokedError, UserError
from tinsmith.hook_values import Principal
from tinsmith.protocol import wire
from tinsmith.server.archives import Archive, RangeOutsideError, wanted_range
from tinsmith.server.auth import Caller, may_read, readable_checkpoint
from tinsmith.server.context import API_PREFIX, Context, ServerContext
from tinsmith.server.json_routes import JsonRoute
from tinsmith.server.routes.runs import CHECKPOINT, path_of
from tinsmith.server.signed_urls import Grant
from tinsmith.store import CheckpointRecord
from tinsmith.store.refusals import no_such
from tinsmith.store.revocation import why_gone

router = APIRouter(prefix=API_PREFIX, tags=["runs and checkpoints"], route_class=JsonRoute)
open_router = APIRouter(prefix=API_PREFIX, tags=["runs and checkpoints"])

LINK_LIFETIME: Final = timedelta(hours=1)
_ARCHIVE: Final = ".tar"


@router.get(CHECKPOINT + "/external_weights_urls")
async def external_weights_urls(
    model_id: str, kind: str, name: str, caller: Caller, context: Context, request: Request
) -> wire.ExternalWeightsUrls:
    path = path_of(model_id, kind, name)
    record = await readable_checkpoint(context, caller, path)
    if record.kind != "external":
        msg = f"{path!r} is not an export; make one with save_weights_external and ask for its links"
        raise UserError(msg)
    files = await asyncio.to_thread(checkpoints.checkpoint_files, context.checkpoint_root, record.directory)
    expires, grant = context.now() + LINK_LIFETIME, make_grant(context, caller, record, request.headers)
    urls: dict[str, str] = {}
    for file in files:
        signed = context.signer.url_path(f"{link_name(record)}/{file.name}", expires, grant)
        urls[file.name] = f"{base_url(context, request)}/api/v1/files/{signed}"
    return wire.ExternalWeightsUrls(urls=urls, expires=expires)


@router.get(CHECKPOINT + "/archive")
async def archive_url(
    model_id: str, kind: str, name: str, caller: Caller, context: Context, request: Request
) -> wire.ArchiveUrl:
    """Asked by SDKs up to 0.35. Every kind of checkpoint can be downloaded as an archive."""
    record = await readable_checkpoint(context, caller, path_of(model_id, kind, name))
    expires, grant = context.now() + LINK_LIFETIME, make_grant(context, caller, record, request.headers)
    signed = context.signer.url_path(f"{link_name(record)}{_ARCHIVE}", expires, grant)
    return wire.ArchiveUrl(url=f"{base_url(context, request)}/api/v1/archives/{signed}", expires=expires)


def base_url(context: ServerContext, request: Request) -> str:
    return (context.settings.server.public_url or str(request.base_url)).rstrip("/")


async def _while_sending() -> AsyncIterator[ExitStack]:
    """Yield a stack of what ends when the answer has been sent."""
    with ExitStack() as stack:
        yield stack


WhileSending = Annotated[ExitStack, Depends(_while_sending)]


@open_router.get("/files/{stamp}/{grant}/{signature}/{name:path}")
async def get_file(
    stamp: int, grant: str, signature: str, name: str, context: Context, sending: WhileSending
) -> FileResponse:
    """Send a file. The signature replaces the key; only files that `external_weights_urls` has listed have one."""
    given = context.signer.check(name, stamp, grant, signature, context.now())
    checkpoint, _, file_name = name.rpartition("/")
    record, tenant = await refuse_revoked(context, checkpoint, given)
    sending.enter_context(context.quotas.in_progress(tenant, polls=False))
    files = await asyncio.to_thread(checkpoints.checkpoint_files, context.checkpoint_root, record.directory)
    for file in files:
        if file.name == file_name:
            return FileResponse(file, media_type="application/octet-stream")
    raise NotFoundError(no_such("file", name))


@open_router.get("/archives/{stamp}/{grant}/{signature}/{name:path}")
async def get_archive(
    stamp: int, grant: str, signature: str, name: str, context: Context, sending: WhileSending, request: Request
) -> Response:
    """The signature stands for the key; only archives that `archive_url` has named have one. Takes one `Range`."""
    given = context.signer.check(name, stamp, grant, signature, context.now())
    record, tenant = await refuse_revoked(context, name.removesuffix(_ARCHIVE), given)
    sending.enter_context(context.quotas.in_progress(tenant, polls=False))
    files = await asyncio.to_thread(checkpoints.open_checkpoint_files, context.checkpoint_root, record.directory)
    return _sent(Archive(files, record.directory), request.headers)


def _sent(archive: Archive, asked: Mapping[str, str]) -> Response:
    """Send an archive, or the rest of one that a client has the beginning of."""
    headers = {"Accept-Ranges": "bytes", "ETag": archive.etag}
    try:
        wanted = wanted_range(asked.get("range"), asked.get("if-range"), archive)
    except RangeOutsideError:
        archive.close()
        return Response(status_code=416, headers={**headers, "Content-Range": f"bytes */{archive.size}"})
    start, stop = wanted or (0, archive.size)
    headers["Content-Length"] = str(stop - start)
    if wanted is not None:
        headers["Content-Range"] = f"bytes {start}-{stop - 1}/{archive.size}"
    status = 200 if wanted is None else 206
    return StreamingResponse(archive.read(start, stop), status, headers, media_type="application/x-tar")


# What a link rests on -------------------------------------------------------------------------------------------------


def make_grant(
    context: ServerContext, caller: Principal, record: CheckpointRecord, headers: Mapping[str, str]
) -> Grant:
    """Return the facts behind this caller's link to this checkpoint. `headers`: of the request for the link."""
    return Grant(
        created_at=record.created_at,
        only_while_public=record.tenant != caller.tenant and not caller.admin,
        key_id=context.api_keys.made_with(caller, headers),
    )


def link_name(record: CheckpointRecord) -> str:
    """Return the name of a checkpoint in links: its path without the scheme. Its directory is found anew each time."""
    return record.path.removeprefix("tinker://")


async def refuse_revoked(context: ServerContext, name: str, grant: Grant) -> tuple[CheckpointRecord, str]:
    """Return the checkpoint, and the tenant for which the download counts: the link's, else the owner.

    The tenant is empty if the link is another tenant's, who is not known: the owner of a published checkpoint is not
    charged.

    Raises RevokedError if the checkpoint may no longer be read, and AuthenticationError if the key was removed. Raises
    NotFoundError if `name` is no checkpoint's: the link was made for another route.
    """
    path = _checkpoint_in(name)
    owner = await owner_of_key(context, grant)
    try:
        record = await context.store.get_checkpoint(path)
    except NotFoundError as error:
        raise _revoked(path, "was deleted") from error
    why = _why_revoked(context, record, grant, owner)
    if why is not None:
        raise _revoked(path, why)
    if owner is not None:
        return record, owner.tenant
    return record, "" if grant.only_while_public else record.tenant


def _revoked(path: str, why: str) -> RevokedError:
    return RevokedError(f"this download link is no longer valid: checkpoint {path!r} {why}")


def _checkpoint_in(name: str) -> str:
    try:
        return str(TinkerPath.parse(f"tinker://{name}"))
    except UserError as error:
        raise NotFoundError(no_such("checkpoint", name)) from error


async def owner_of_key(context: ServerContext, grant: Grant) -> Principal | None:
    """Return whose key made the link, or None if it rests on no key. A login must not have ended."""
    try:
        return await context.api_keys.look_up_owner(grant.key_id)
    except AuthenticationError as error:
        msg = f"this download link is no longer valid: {error}"
        raise AuthenticationError(msg) from error


def _why_revoked(context: ServerContext, record: CheckpointRecord, grant: Grant, owner: Principal | None) -> str | None:
    if (why := why_gone(record, grant.created_at, context.now())) is not None:
        return why
    if grant.only_while_public and not record.public:
        return "was unpublished by its owner"
    if owner is not None and not may_read(record, owner):
        return "is not published, and the API key of the link may no longer read it"
    return None
