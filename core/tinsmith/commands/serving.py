"""`tinsmith serve`, `engine` and `check-config`: the commands that run a server, and a check of its configuration."""

from __future__ import annotations

import os
from functools import partial
from typing import Annotated

import typer

from tinsmith.commands.load_settings import load_api_keys, load_settings
from tinsmith.commands.options import (
    ANY_SETTING,
    WITH_MODEL,
    Backend,
    BaseModel,
    ConfigFile,
    DataDir,
    LogFormat,
    LogLevel,
    ModelAndSettings,
    Name,
    flags_of,
    plugins_of,
    setting_flag,
    settings_of,
)
from tinsmith.processes.before_start import faults_of_file, refuse


def add_serving_commands(group: typer.Typer) -> None:
    group.command("serve", context_settings=WITH_MODEL)(serve)
    group.command("engine", context_settings=ANY_SETTING)(engine)
    group.command("check-config", context_settings=WITH_MODEL)(check_config)


def serve(
    context: typer.Context,
    model: ModelAndSettings = None,
    config: ConfigFile = None,
    base_model: BaseModel = None,
    name: Name = None,
    backend: Backend = None,
    host: Annotated[str | None, setting_flag("server.host")] = None,
    port: Annotated[int | None, setting_flag("server.port")] = None,
    data_dir: DataDir = None,
    store: Annotated[str | None, setting_flag("store")] = None,
    log_level: LogLevel = None,
    log_format: LogFormat = None,
) -> None:
    """Serve base models to Tinker clients. A model that is not on this machine is downloaded from the hub."""
    from tinsmith.processes.serve import serve as run_server  # here, because `version` needs no web framework
    from tinsmith.server.live_keys import LiveKeys

    flags = flags_of(
        context,
        ("--host", "server.host", host),
        ("--port", "server.port", port),
        ("--data-dir", "server.data_dir", data_dir),
        ("--store", "store.plugin", store),
        ("--log-level", "server.log_level", log_level),
        ("--log-format", "server.log_format", log_format),
        arguments=model,
        base_model=base_model,
        name=name,
        backend=backend,
    )
    environ = dict(os.environ)
    settings = load_settings(plugins_of(context), file=config, environ=environ, flags=flags)
    read = partial(load_api_keys, file=config, environ=environ, flags=flags)
    run_server(settings, plugins_of(context), LiveKeys(read(), read=read))


def engine(
    context: typer.Context,
    model: Annotated[str, typer.Argument(help="name of one of the configured models")],
    config: ConfigFile = None,
    base_model: BaseModel = None,
    backend: Backend = None,
    data_dir: DataDir = None,
    log_level: LogLevel = None,
    log_format: LogFormat = None,
) -> None:
    """Run the engine of one base model by hand, on the same database as the server."""
    from tinsmith.processes.engine import misconfiguration_told_once, run_engine

    with misconfiguration_told_once():
        settings = settings_of(
            context,
            config,
            ("--data-dir", "server.data_dir", data_dir),
            ("--log-level", "server.log_level", log_level),
            ("--log-format", "server.log_format", log_format),
            base_model=base_model,
            backend=backend,
        )
        run_engine(settings, model, plugins_of(context))


def check_config(
    context: typer.Context,
    model: ModelAndSettings = None,
    config: ConfigFile = None,
    base_model: BaseModel = None,
    name: Name = None,
    backend: Backend = None,
) -> None:
    """Check the configuration, and print every resulting setting. Starts nothing, and disturbs no running server."""
    settings = settings_of(context, config, arguments=model, base_model=base_model, name=name, backend=backend)
    typer.echo(settings.model_dump_json(indent=2))
    refuse(faults_of_file(settings, plugins_of(context)))
