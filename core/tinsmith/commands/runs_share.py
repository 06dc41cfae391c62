"""`tinsmith runs share`: links to the curves of a run."""

from tinsmith.commands.open_store import find_run
from tinsmith.errors import NotFoundError
from tinsmith.server.share_links import make_link, url_of
from tinsmith.settings import ServerSettings
from tinsmith.store import RequestStore

ALL = "all"


async def share(
    store: RequestStore, run: str, server: ServerSettings, *, lasts_s: float | None
) -> dict[str, str | None]:
    """Make a link to the run. Raises NotFoundError or UserError as `find_run` does."""
    link, secret = await make_link(store, await find_run(store, run), lasts_s=lasts_s)
    url = url_of(server.public_url or f"http://{server.host}:{server.port}", link, secret)
    expires_at = None if link.expires_at is None else link.expires_at.isoformat()
    return {"share_id": link.share_id, "url": url, "expires_at": expires_at}


async def revoke_links(store: RequestStore, run: str, share_id: str) -> list[str]:
    """Return the ids of the links that have ended. Raises NotFoundError if there is none of this id."""
    model_id = await find_run(store, run)
    links = await store.list_share_links(model_id)
    ended = [link.share_id for link in links if share_id in (ALL, link.share_id)]
    if not ended:
        known = ", ".join(link.share_id for link in links) or "none"
        msg = f"run {model_id!r} has no share link {share_id!r}; its links: {known}"
        raise NotFoundError(msg)
    for each in ended:
        await store.delete_share_link(model_id, each)
    return ended
