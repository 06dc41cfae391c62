"""Checks with every download, on every server, that the grant of its link still holds."""

from collections.abc import Mapping

from tinsmith.checkpoints.tinker_path import TinkerPath
from tinsmith.errors import AuthenticationError, NotFoundError, RevokedError, TinsmithError, UserError
from tinsmith.hook_values import Principal
from tinsmith.server.auth import may_read
from tinsmith.server.context import API_PREFIX, ServerContext
from tinsmith.server.signed_urls import Grant
from tinsmith.store import CheckpointRecord
from tinsmith.store.refusals import no_such
from tinsmith.store.revocation import why_gone


def make_grant(
    context: ServerContext, caller: Principal, record: CheckpointRecord, headers: Mapping[str, str]
) -> Grant:
    """Return what a link of this caller to this checkpoint rests on. `headers` are those of the request for it."""
    return Grant(
        created_at=record.created_at,
        only_while_public=record.tenant != caller.tenant and not caller.admin,
        key_id=context.api_keys.id_used(caller, headers) or "",
    )


def link_name(record: CheckpointRecord) -> str:
    """Return the name of a checkpoint in links: its path without the scheme. Its directory is found anew each time."""
    return record.path.removeprefix("tinker://")


def has_signature(context: ServerContext, path: str) -> bool:
    """Return whether a path is that of a link which this server has signed. It may have been revoked since."""
    parts = path.removeprefix(f"{API_PREFIX}/").split("/", 4)
    if len(parts) < 5 or parts[0] not in ("files", "archives"):
        return False
    _, stamp, grant, signature, name = parts
    try:
        context.signer.check(name, int(stamp), grant, signature, context.now())
    except (TinsmithError, ValueError):
        return False
    return True


async def refuse_revoked(context: ServerContext, name: str, grant: Grant) -> tuple[CheckpointRecord, str]:
    """Return the checkpoint, and the tenant for which the download counts: that of the link's key, else the owner.

    The tenant is empty if the link is another tenant's, who is not known: the owner of a published checkpoint is not
    charged.

    Raises RevokedError if the checkpoint may no longer be read, and AuthenticationError if the key was removed. Raises
    NotFoundError if `name` is no checkpoint's: the link was made for another route.
    """
    path = _checkpoint_in(name)
    owner = _owner_of_key(context, grant)
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


def _owner_of_key(context: ServerContext, grant: Grant) -> Principal | None:
    """Return whose key made the link, or None if it rests on no configured key."""
    try:
        return context.api_keys.owner_of_id(grant.key_id) if grant.key_id else None
    except AuthenticationError as error:
        msg = "the API key with which this download link was made has been removed"
        raise AuthenticationError(msg) from error


def _why_revoked(context: ServerContext, record: CheckpointRecord, grant: Grant, owner: Principal | None) -> str | None:
    if (why := why_gone(record, grant.created_at, context.now())) is not None:
        return why
    if grant.only_while_public and not record.public:
        return "was unpublished by its owner"
    if owner is not None and not may_read(record, owner):
        return "is not published, and the API key of the link may no longer read it"
    return None
