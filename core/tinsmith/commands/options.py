"""The options that several commands share, and the settings that a command line comes to.

Every setting is an option (`--server.port 8001`), and the common ones have short names.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from tinsmith.commands.load_settings import load_settings
from tinsmith.errors import ConfigError
from tinsmith.plugins.loading import Plugins
from tinsmith.plugins.registry import suggestion
from tinsmith.settings import Settings
from tinsmith.settings.schema import field_of
from tinsmith.settings.sources import Flag

ANY_SETTING: Final[dict[str, Any]] = {"allow_extra_args": True, "ignore_unknown_options": True}
"""The context of a command that takes `--section.key value` for every setting."""

WITH_MODEL: Final[dict[str, Any]] = {"ignore_unknown_options": True}


def setting_flag(key: str) -> Any:
    """Return a short option for a setting, described as the setting is."""
    return typer.Option(help=field_of(Settings, key).description)


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
LogFormat = Annotated[str | None, setting_flag("server.log_format")]
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
    """Return the settings of a command that names a model. Arguments as of `flags_of`."""
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
    return settings_of(context, config, ("--data-dir", "server.data_dir", data_dir), needs_models=False)


def settings_flags(
    *,
    base_model: str | None = None,
    base_model_name: str | None = None,
    backend: str | None = None,
    short: Sequence[tuple[str, str, object]] = (),
    rest: Sequence[str] = (),
) -> list[Flag]:
    """Return flags in rising precedence.

    `short` holds (option, key, value) of named options; the value is None if the option was not given. `rest` is
    whatever else was typed: `--key value` or `--key=value`. Raise ConfigError if it is anything else.
    """
    flags = list(_base_model(base_model, base_model_name))
    if backend is not None:
        flags.append(Flag("models.0.backend.plugin", backend, "--backend"))
    flags += [Flag(key, str(value), option) for option, key, value in short if value is not None]
    return flags + list(_dotted(rest, [option for option, _, _ in short]))


def take_model(arguments: Sequence[str], base_model: str | None) -> tuple[str | None, list[str]]:
    """Take the one argument that is neither an option nor its value: the model. Return it and the others.

    `base_model` is what `--base-model` says. Raise ConfigError if there are several models.
    """
    models = [] if base_model is None else [base_model]
    others: list[str] = []
    rest = iter(arguments)
    for argument in rest:
        if not argument.startswith("--"):
            models.append(argument)
        else:
            others.append(argument)
            if "=" not in argument:
                others += [value for value in (next(rest, None),) if value is not None]
    if len(models) > 1:
        msg = f"one model can be given here, and these are {len(models)}: {', '.join(models)}; list several in a file"
        raise ConfigError(msg)
    return next(iter(models), None), others


def base_model_name_of(path: str) -> str:
    """Return the name by which clients ask for a base model that is served from a path.

    A directory is named by its absolute path, because clients load the tokenizer from the `base_model` that they pass.
    If the path contains exactly two slashes, one is appended: the SDK would otherwise read it as
    `organisation/model/variant` and truncate it.
    """
    directory = Path(path).expanduser()
    if not directory.is_dir():
        return path
    name = str(directory.absolute())
    return f"{name}/" if name.count("/") == 2 else name


def _base_model(base_model: str | None, name: str | None) -> Iterator[Flag]:
    if base_model is None:
        if name is not None:
            msg = "--name: pass the directory that gets this name, as in `tinsmith serve DIRECTORY --name NAME`"
            raise ConfigError(msg)
        return
    yield Flag("models", json.dumps([_model(base_model, name)]), "--base-model")


def _model(base_model: str, name: str | None) -> dict[str, str]:
    """Describe a model by its directory, or by NAME or NAME@REVISION on the hub."""
    if Path(base_model).expanduser().is_dir():
        return {"name": name or base_model_name_of(base_model), "path": base_model}
    on_hub, _, revision = base_model.partition("@")
    if name not in (None, on_hub):
        msg = f"--name: there is no directory {base_model!r}, and models from the hub keep their names; leave it out"
        raise ConfigError(msg)
    return {"name": on_hub, **({"revision": revision} if revision else {})}


def _dotted(arguments: Sequence[str], known: Sequence[str]) -> Iterator[Flag]:
    rest = iter(arguments)
    for argument in rest:
        option, equals, text = argument.partition("=")
        key = option.removeprefix("--")
        if not option.startswith("--"):
            msg = f"unexpected argument {argument!r}; settings are given as --key value"
            raise ConfigError(msg)
        if "." not in key and key != "models":
            msg = f"no option {option!r}{suggestion(option, known)}; any setting can be given as --section.key value"
            raise ConfigError(msg)
        if not equals:
            following = next(rest, None)
            if following is None:
                msg = f"{option} needs a value: {option} VALUE"
                raise ConfigError(msg)
            text = following
        yield Flag(key, text)
