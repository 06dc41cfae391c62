"""Links by which whoever has them reads the curves of one run: made for the page, the API and `tinsmith runs share`.

The secret of a link is in the part of its URL that browsers send to no server, and in a header of the page's requests.
"""

import hashlib
import secrets
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from typing import Final
from urllib.parse import urlencode

from fastapi import Request

from tinsmith.errors import NotFoundError, UserError
from tinsmith.server.auth import readable_run, viewer_of
from tinsmith.server.context import Context
from tinsmith.store import RequestStore, RunRecord, ShareLink
from tinsmith.store.refusals import no_such

HEADER: Final = "x-share-secret"
MOST_LINKS: Final = 100
"""To one run, expired ones as well: a list of them is one answer."""
_ID_BYTES: Final = 6
_SECRET_BYTES: Final = 24


async def make_link(
    store: RequestStore, model_id: str, *, lasts_s: float | None, by: Mapping[str, str] | None = None
) -> tuple[ShareLink, str]:
    """Keep a new link to a run, for ever or for so many seconds. Return it, and its secret, which nobody keeps.

    Raises NotFoundError if there is no such run, and UserError if it has MOST_LINKS links.
    """
    if len(await store.list_share_links(model_id)) >= MOST_LINKS:
        msg = f"run {model_id!r} has {MOST_LINKS} share links, which is the most; revoke one"
        raise UserError(msg)
    now, secret = datetime.now(UTC), secrets.token_urlsafe(_SECRET_BYTES)
    link = ShareLink(
        share_id=secrets.token_hex(_ID_BYTES),
        digest=_digest(secret),
        model_id=model_id,
        created_at=now,
        expires_at=None if lasts_s is None else now + timedelta(seconds=lasts_s),
    )
    await store.add_share_link(link, by=by)
    return link, secret


def url_of(server_url: str, link: ShareLink, secret: str) -> str:
    return f"{server_url.rstrip('/')}/#{urlencode({'run': link.model_id, 'share': secret})}"


async def shared_run(request: Request, context: Context, model_id: str) -> RunRecord:
    """Return a run that the sender may read: by a link to it, or as `readable_run`.

    A link that has expired or was revoked, or is to another run, finds nothing.
    """
    if (secret := request.headers.get(HEADER)) is None:
        return await readable_run(context, await viewer_of(request, context), model_id)
    link = await context.store.find_share_link(_digest(secret))
    expired = link is not None and link.expires_at is not None and link.expires_at <= context.now()
    if link is None or expired or link.model_id != model_id:
        raise NotFoundError(f"{no_such('model', model_id)}, or the link to it has expired or was revoked")
    return await context.store.get_run(model_id)


def _digest(secret: str) -> str:
    return hashlib.sha256(secret.encode()).hexdigest()
