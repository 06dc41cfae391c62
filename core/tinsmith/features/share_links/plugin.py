"""What the feature offers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tinsmith.hookspecs import hookimpl
from tinsmith.store import Tables, TablesSpec

if TYPE_CHECKING:
    import typer
    from fastapi import APIRouter

    from tinsmith.hook_values import RoutesContext
    from tinsmith.settings import Settings


@hookimpl
def tinsmith_register_tables() -> TablesSpec:
    return TablesSpec(name="share_links", create=_tables, description="links to the curves of runs")


def _tables() -> Tables:
    from tinsmith.features.share_links.links import Table  # imports are in functions: not every process needs them all

    return Tables(metadata=Table.metadata)


@hookimpl
def tinsmith_register_routes(settings: Settings, context: RoutesContext) -> APIRouter:
    from tinsmith.features.share_links.routes import share_routes

    return share_routes(settings, context)


@hookimpl
def tinsmith_register_commands(group: typer.Typer) -> None:
    from tinsmith.command_line import ANY_SETTING, subgroup
    from tinsmith.features.share_links.command import share_run

    subgroup(group, "runs").command("share", context_settings=ANY_SETTING)(share_run)
