"""Offers `tinsmith trackers` and `tinsmith track` where tinsmith is installed, too. Only tinsmith loads this module."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pluggy  # comes with tinsmith

if TYPE_CHECKING:
    import typer

hookimpl = pluggy.HookimplMarker("tinsmith")


@hookimpl
def tinsmith_register_commands(group: typer.Typer) -> None:
    from tinsmith_trackers.command import trackers
    from tinsmith_trackers.following import track

    group.command("trackers")(trackers)
    group.command("track")(track)
