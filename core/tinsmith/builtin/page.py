"""The page at `/` and its files, added as a stranger's plugin would add them: the same for everybody.

The page fetches its content from the API, with its reader's key. Its URLs are relative: a proxy may serve it below a
path.
"""

from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Final

from tinsmith.hookspecs import hookimpl

if TYPE_CHECKING:
    from fastapi import APIRouter

    from tinsmith.hook_values import RoutesContext
    from tinsmith.settings import Settings

_FILES: Final = Path(__file__).parent / "page_files"
_LOGIN: Final = '<script src="page/login.js"></script>'
_HEADERS: Final = {
    "Content-Security-Policy": "default-src 'self'; style-src 'self' 'unsafe-inline'; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "Cache-Control": "no-cache",  # a newer server has newer files
}


@hookimpl
def tinsmith_register_routes(settings: "Settings", context: "RoutesContext") -> "APIRouter":
    from fastapi import APIRouter, Response  # here, since only the server needs a web framework
    from fastapi.responses import FileResponse, HTMLResponse

    router = APIRouter(include_in_schema=False)
    login = "" if settings.login is None else _LOGIN
    html = (
        (_FILES / "index.html")
        .read_text(encoding="utf-8")
        .replace("{version}", version("tinsmith"))
        .replace("{login}", login)
    )
    files = {each.name: each for each in _FILES.iterdir() if each.name != "index.html"}

    @router.get("/")
    @context.public
    async def page() -> HTMLResponse:
        parts = [f'<script type="module" src="page/{each.name}"></script>' for each in context.page_parts]
        return HTMLResponse(html.replace("{parts}", "\n".join(parts)), headers=_HEADERS)

    @router.get("/page/{name}")
    @context.public
    async def file(name: str) -> Response:
        found = files.get(name) or next((each for each in context.page_parts if each.name == name), None)
        return Response(status_code=404) if found is None else FileResponse(found, headers=_HEADERS)

    return router
