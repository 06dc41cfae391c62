"""The routes: make, list and revoke links; and who may read a run by one."""

from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, Final

from fastapi import APIRouter, Depends, Request
from pydantic import BaseModel, ConfigDict, Field

from tinsmith.errors import NotFoundError
from tinsmith.features.share_links import links
from tinsmith.hook_values import Principal, RoutesContext, RunReader
from tinsmith.settings import Settings
from tinsmith.store import RequestStore

HEADER: Final = "x-share-secret"
_TEN_YEARS_S: Final = 10 * 365 * 86400


class ShareRequest(BaseModel):
    model_config = ConfigDict(extra="forbid")

    expires_in_s: Annotated[float, Field(gt=0, le=_TEN_YEARS_S)] | None = None  # default: when its run is deleted


class ShareLink(BaseModel):
    share_id: str
    created_at: datetime
    expires_at: datetime | None = None
    url: str | None = None  # of a new one only: its secret is kept nowhere


class ShareLinks(BaseModel):
    links: list[ShareLink]


class Links(RunReader):
    def __init__(self, store: RequestStore) -> None:
        self._store = store

    def shown(self, headers: Mapping[str, str]) -> str | None:
        return headers.get(HEADER)

    async def opens(self, credential: str, model_id: str) -> bool:
        link = await self._store.read(links.find, links.digest_of(credential))
        return link is not None and link.model_id == model_id and not link.has_expired(datetime.now(UTC))


def share_routes(settings: Settings, context: RoutesContext) -> APIRouter:
    router = APIRouter(prefix="/api/v1/runs/{model_id}/share_links", tags=["metrics"], route_class=context.json_route)
    store = context.store
    context.page_parts.append(Path(__file__).parent / "share.js")
    Caller = Annotated[Principal, Depends(context.caller)]
    Actor = Annotated[Mapping[str, str], Depends(context.actor)]

    context.run_readers.append(Links(store))

    @router.post("", response_model_exclude_none=True)
    async def share_run(model_id: str, body: ShareRequest, request: Request, caller: Caller, actor: Actor) -> ShareLink:
        """Make a link by which everybody who has it reads the curves of the run, and nothing else."""
        await context.own_run(caller, model_id)
        link, secret = await links.make_link(store, model_id, lasts_s=body.expires_in_s, by=actor)
        server_url = settings.server.public_url or str(request.base_url)
        return _shown(link, url=links.url_of(server_url, link, secret))

    @router.get("", response_model_exclude_none=True)
    async def list_share_links(model_id: str, caller: Caller) -> ShareLinks:
        """List the links to the run, expired ones as well, without their secrets."""
        await context.own_run(caller, model_id)
        return ShareLinks(links=[_shown(link) for link in await store.read(links.of_run, model_id)])

    @router.delete("/{share_id}")
    async def revoke_share_link(model_id: str, share_id: str, caller: Caller, actor: Actor) -> dict[str, str]:
        await context.own_run(caller, model_id)
        if not await store.write(links.delete, model_id, share_id, by=actor):
            msg = f"run {model_id!r} has no share link {share_id!r}"
            raise NotFoundError(msg)
        return {"revoked": share_id}

    return router


def _shown(link: links.ShareLink, **more: Any) -> ShareLink:
    return ShareLink(share_id=link.share_id, created_at=link.created_at, expires_at=link.expires_at, **more)
