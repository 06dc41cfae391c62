"""The page at `/`, added as a stranger's plugin would add one."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tinsmith.hookspecs import hookimpl

if TYPE_CHECKING:
    from fastapi import APIRouter

    from tinsmith.hook_values import RoutesContext


@hookimpl
def tinsmith_register_routes(context: RoutesContext) -> APIRouter:
    from tinsmith.builtin.page_routes import page_router  # here, since only the server needs a web framework

    return page_router(context)
