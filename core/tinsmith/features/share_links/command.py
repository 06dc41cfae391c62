"""`tinsmith runs share`."""

from __future__ import annotations

from typing import Annotated, Final

import typer

from tinsmith.command_line import AsJson, ConfigFile, DataDir, Run, find_run, print_json, use_store
from tinsmith.errors import NotFoundError
from tinsmith.features.share_links import links
from tinsmith.settings import Settings
from tinsmith.store import RequestStore

_ALL: Final = "all"


def share_run(
    context: typer.Context,
    run: Run,
    hours: Annotated[
        float | None, typer.Option(min=0.01, help="hours until the link ends; default: it lasts as long as its run")
    ] = None,
    revoke: Annotated[str | None, typer.Option(help="end the link of this id, or `all` links to the run")] = None,
    json: AsJson = False,
    config: ConfigFile = None,
    data_dir: DataDir = None,
) -> None:
    """Print a link by which everybody who has it reads the curves of a run, and nothing else; or end links to it."""
    if revoke is not None:
        ended = use_store(context, lambda store, _: _revoke(store, run, revoke), config=config, data_dir=data_dir)
        print_json({"revoked": ended}) if json else typer.echo(f"revoked {', '.join(ended)}")
        return

    async def share(store: RequestStore, settings: Settings) -> dict[str, str | None]:
        lasts_s = None if hours is None else hours * 3600
        link, secret = await links.make_link(store, await find_run(store, run), lasts_s=lasts_s)
        server = settings.server
        url = links.url_of(server.public_url or f"http://{server.host}:{server.port}", link, secret)
        expires_at = None if link.expires_at is None else link.expires_at.isoformat()
        return {"share_id": link.share_id, "url": url, "expires_at": expires_at}

    link = use_store(context, share, config=config, data_dir=data_dir)
    print_json(link) if json else typer.echo(link["url"])


async def _revoke(store: RequestStore, run: str, share_id: str) -> list[str]:
    """Return the ids of the links that have ended. Raises NotFoundError if there is none of this id."""
    model_id = await find_run(store, run)
    there = await store.read(links.of_run, model_id)
    ended = [link.share_id for link in there if share_id in (_ALL, link.share_id)]
    if not ended:
        known = ", ".join(link.share_id for link in there) or "none"
        msg = f"run {model_id!r} has no share link {share_id!r}; its links: {known}"
        raise NotFoundError(msg)
    for each in ended:
        await store.write(links.delete, model_id, each)
    return ended
