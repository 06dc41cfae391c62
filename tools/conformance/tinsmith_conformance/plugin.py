"""Offers `tinsmith conformance` where tinsmith is installed, too. Only tinsmith loads this module."""

from __future__ import annotations

from typing import Any

import pluggy  # comes with tinsmith

hookimpl = pluggy.HookimplMarker("tinsmith")


@hookimpl
def tinsmith_register_commands(group: Any) -> None:
    import typer  # comes with tinsmith

    anything = {"ignore_unknown_options": True, "allow_extra_args": True, "help_option_names": []}

    def conformance(context: typer.Context) -> None:
        """Score any server of the Tinker API: `tinsmith conformance --url URL --model NAME`."""
        from tinsmith_conformance.command import main

        main(context.args, "tinsmith conformance")

    conformance.__annotations__ = {"context": typer.Context}  # typer reads them, and knows no names of this function
    group.command("conformance", context_settings=anything)(conformance)
