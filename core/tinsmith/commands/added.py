"""What commands that packages add are made with: groups to add them to, and the request store."""

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TypeVar

import typer

from tinsmith.commands import open_store
from tinsmith.commands.options import plugins_of, settings_without_models
from tinsmith.settings import Settings
from tinsmith.store import RequestStore

T = TypeVar("T")


def subgroup(group: typer.Typer, name: str) -> typer.Typer:
    """Return the group of that name, such as `runs`, to add commands to: a new one if there is none."""
    for each in group.registered_groups:
        if each.name == name and each.typer_instance is not None:
            return each.typer_instance
    made = typer.Typer(no_args_is_help=True)
    group.add_typer(made, name=name)
    return made


def use_store(
    context: typer.Context,
    use: Callable[[RequestStore, Settings], Awaitable[T]],
    *,
    config: Path | None = None,
    data_dir: Path | None = None,
) -> T:
    """Return what `use` returns for the request store and the settings of a command, whether or not a server runs.

    Raise ConfigError if there is no store where the settings say.
    """
    settings = settings_without_models(context, config, data_dir)
    return open_store.use_store(settings, plugins_of(context), lambda store: use(store, settings))
