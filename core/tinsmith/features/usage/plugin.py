"""What the feature offers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tinsmith.hookspecs import hookimpl
from tinsmith.store import Tables, TablesSpec

if TYPE_CHECKING:
    from fastapi import APIRouter

    from tinsmith.hook_values import RoutesContext


@hookimpl
def tinsmith_register_tables() -> TablesSpec:
    return TablesSpec(name="usage", create=_tables, description="what each tenant has used, by hour")


def _tables() -> Tables:
    from tinsmith.features.usage.counts import Table, count  # imports are in functions: not every process needs all

    return Tables(metadata=Table.metadata, completed=count)


@hookimpl
def tinsmith_register_routes(context: RoutesContext) -> APIRouter:
    from tinsmith.features.usage.routes import usage_routes

    return usage_routes(context)
