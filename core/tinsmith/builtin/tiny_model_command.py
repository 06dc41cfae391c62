"""The command `tinsmith tiny-model`, added as a stranger's plugin would add one."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tinsmith.hookspecs import hookimpl

if TYPE_CHECKING:
    import typer


@hookimpl
def tinsmith_register_commands(group: typer.Typer) -> None:
    from tinsmith.builtin.tiny_model_cli import tiny_model  # here, since other processes make no models

    group.command("tiny-model")(tiny_model)
