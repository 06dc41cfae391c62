"""Whether a right to use a checkpoint that was granted before still holds. Server and engine ask here.

That is a sampling session that was opened on it, or an operation that waits to load it.

Nothing is written when a checkpoint is unpublished or deleted, or when it expires: every request looks at the
checkpoint as it is now, so a revocation takes effect at the next request on every server.
"""

from datetime import datetime

from tinsmith.errors import NotFoundError, RevokedError
from tinsmith.operations import ReadRight
from tinsmith.store.records.checkpoints import CheckpointRecord
from tinsmith.store.records.sampling import SamplingSessionRecord
from tinsmith.store.request_store import RequestStore


async def usable_checkpoint(
    store: RequestStore, session: SamplingSessionRecord, now: datetime
) -> CheckpointRecord | None:
    """Return the checkpoint that a sampling session rests on; None if it rests on none.

    Raise RevokedError, with the reason, if the session may no longer use it.
    """
    if session.model_path is None:
        return None
    try:
        found = await store.get_checkpoint(session.model_path)
    except NotFoundError as error:
        raise revoked(session, "was deleted") from error
    why = why_gone(found, session.checkpoint_created_at, now)
    if why is None and session.only_while_public and not found.public:
        why = "was unpublished by its owner"
    if why is not None:
        raise revoked(session, why)
    return found


async def loadable_checkpoint(
    store: RequestStore, path: str, *, tenant: str, right: ReadRight, now: datetime
) -> CheckpointRecord:
    """Return the checkpoint that an operation of this tenant loads.

    Raise NotFoundError if there is none, RevokedError if the operation may no longer read it.
    """
    found = await store.get_checkpoint(path)
    why = why_gone(found, right.created_at, now)
    if why is None and not (found.public or found.tenant == tenant or not right.only_while_public):
        why = "was unpublished by its owner"
    if why is not None:
        msg = f"checkpoint {path!r} {why} while this request waited; load a checkpoint that you may read"
        raise RevokedError(msg)
    return found


def why_gone(found: CheckpointRecord, created_at: datetime | None, now: datetime) -> str | None:
    """Return why the checkpoint found under a name is not the one created at `created_at`; None if it is.

    If `created_at` is None, any checkpoint of that name will do, unless it has expired.
    """
    if found.expires_at is not None and found.expires_at <= now:
        return f"expired at {found.expires_at:%Y-%m-%d %H:%M:%S} UTC"
    if created_at not in {None, found.created_at}:
        return "was replaced by a later one of the same name"
    return None


def revoked(session: SamplingSessionRecord, why: str) -> RevokedError:
    return RevokedError(
        f"sampling session {session.sampling_session_id!r} is closed: its checkpoint {session.model_path!r} {why}; "
        "create a sampling session on a checkpoint that you may read"
    )
