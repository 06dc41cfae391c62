"""`/chat` and its files: the same for everybody. The page asks the endpoints for its answers, with its reader's key."""

from pathlib import Path
from typing import Final

from fastapi import APIRouter, Response
from fastapi.responses import FileResponse

from tinsmith import RoutesContext

_FILES: Final = Path(__file__).parent / "chat_files"
_HEADERS: Final = {
    "Content-Security-Policy": "default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "Cache-Control": "no-cache",  # a newer server has newer files
}


def chat_router(context: RoutesContext) -> APIRouter:
    router = APIRouter(include_in_schema=False)

    @router.get("/chat")
    @context.public
    async def page() -> Response:
        return FileResponse(_FILES / "chat.html", headers=_HEADERS)

    @router.get("/chat/{name}")
    @context.public
    async def file(name: str) -> Response:
        if name not in {"chat.css", "chat.js"}:
            return Response(status_code=404)
        return FileResponse(_FILES / name, headers=_HEADERS)

    return router
