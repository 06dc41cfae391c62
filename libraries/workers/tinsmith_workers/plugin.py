"""The command of tinsmith-workers. Imported in every process, but not the module that has the command."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tinsmith import hookimpl

if TYPE_CHECKING:
    import typer


@hookimpl
def tinsmith_register_commands(group: typer.Typer) -> None:
    from tinsmith_workers.command import worker

    group.command("worker")(worker)
