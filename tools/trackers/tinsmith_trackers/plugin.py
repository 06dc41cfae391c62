"""Offers `tinsmith trackers` where tinsmith is installed, too. Only tinsmith loads this module."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pluggy  # comes with tinsmith

if TYPE_CHECKING:
    import typer

hookimpl = pluggy.HookimplMarker("tinsmith")


@hookimpl
def tinsmith_register_commands(group: typer.Typer) -> None:
    from tinsmith_trackers.command import trackers

    group.command("trackers")(trackers)
