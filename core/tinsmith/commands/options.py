"""The options that several commands share, and the settings that a command line comes to."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from tinsmith.commands.flags import setting_flag, settings_flags, take_model
from tinsmith.commands.load_settings import load_settings
from tinsmith.plugins.loading import Plugins
from tinsmith.settings import Settings
from tinsmith.settings.sources import Flag

ANY_SETTING: Final[dict[str, Any]] = {"allow_extra_args": True, "ignore_unknown_options": True}
"""The context of a command that takes `--section.key value` for every setting."""

WITH_MODEL: Final[dict[str, Any]] = {"ignore_unknown_options": True}

ConfigFile = Annotated[
    Path | None, typer.Option("--config", "-c", help="YAML configuration file; default: $TINSMITH_CONFIG")
]
BaseModel = Annotated[
    str | None,
    typer.Option(help="the one model to serve: a Hugging Face directory, or NAME or NAME@REVISION on the hub"),
]
ModelAndSettings = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="MODEL | --SECTION.KEY VALUE",
        help="the one model, as with --base-model; any setting of the configuration file",
        show_default=False,
    ),
]
"""For commands with the context WITH_MODEL: what is neither MODEL nor one of the command's options is a setting."""
Name = Annotated[
    str | None, typer.Option(help="name that clients pass as base_model; default: the directory's absolute path")
]
Backend = Annotated[str | None, typer.Option(help="installed backend that trains the first model")]
DataDir = Annotated[Path | None, setting_flag("server.data_dir")]
LogLevel = Annotated[str | None, setting_flag("server.log_level")]
AsJson = Annotated[bool, typer.Option("--json", help="print everything as JSON, for scripts")]


def plugins_of(context: typer.Context) -> Plugins:
    plugins = context.obj
    assert isinstance(plugins, Plugins)
    return plugins


def settings_of(
    context: typer.Context,
    config: Path | None,
    *short: tuple[str, str, object],
    arguments: Sequence[str] | None = None,
    base_model: str | None = None,
    name: str | None = None,
    backend: str | None = None,
    needs_models: bool = True,
) -> Settings:
    """Return the settings of a command that names a model. The arguments are those of `flags_of`."""
    flags = flags_of(context, *short, arguments=arguments, base_model=base_model, name=name, backend=backend)
    return load_settings(plugins_of(context), file=config, environ=os.environ, flags=flags, needs_models=needs_models)


def flags_of(
    context: typer.Context,
    *short: tuple[str, str, object],
    arguments: Sequence[str] | None = None,
    base_model: str | None = None,
    name: str | None = None,
    backend: str | None = None,
) -> list[Flag]:
    """Return the settings that were typed.

    `short` holds (option, key, value) of other options, `arguments` what came as ModelAndSettings.
    """
    base_model, rest = take_model(arguments or (), base_model)
    rest += context.args
    return settings_flags(base_model=base_model, base_model_name=name, backend=backend, short=short, rest=rest)


def settings_without_models(context: typer.Context, config: Path | None, data_dir: Path | None) -> Settings:
    """Return the settings of a command that looks at the data directory alone."""
    flags = settings_flags(short=[("--data-dir", "server.data_dir", data_dir)], rest=context.args)
    return load_settings(plugins_of(context), file=config, environ=os.environ, flags=flags, needs_models=False)
