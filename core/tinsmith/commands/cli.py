"""The `tinsmith` command line. Commands parse and print; the work is in the modules they call."""

from __future__ import annotations

import os
import sys
from importlib.metadata import version as distribution_version
from pathlib import Path
from typing import Annotated, Any, Final

import typer
from rich.console import Console
from rich.markup import escape

from tinsmith.commands.checkpoint import add_checkpoint_commands
from tinsmith.commands.flags import settings_flags
from tinsmith.commands.load_settings import load_settings
from tinsmith.commands.plugins import add_plugin_commands
from tinsmith.errors import TinsmithError
from tinsmith.plugins.loading import Plugins
from tinsmith.settings import Settings

_EXIT_USAGE: Final = 2
_ANY_SETTING: Final[dict[str, Any]] = {"allow_extra_args": True, "ignore_unknown_options": True}  # Any: click's

ConfigFile = Annotated[Path | None, typer.Option("--config", "-c", help="YAML file; see docs/how-to/configure.md")]
BaseModel = Annotated[
    str | None, typer.Option(help="Hugging Face directory (or cached name) of the one model to serve")
]
Name = Annotated[str | None, typer.Option(help="what clients pass as base_model; default: the directory itself")]
Backend = Annotated[str | None, typer.Option(help="which installed backend trains the first model")]
DataDir = Annotated[Path | None, typer.Option(help="where the database and checkpoints live")]
Limit = Annotated[int, typer.Option(min=1, max=10_000, help="how many to show")]
AsJson = Annotated[bool, typer.Option("--json", help="for scripts: everything, as one JSON object")]
LogLevel = Annotated[str | None, typer.Option(help="debug, info, warning or error")]


def app() -> None:
    """Run the command line; errors meant for people go to stderr without a traceback, with exit code 2."""
    plugins = Plugins.load()
    group = build_group(plugins)
    try:
        group(obj=plugins, prog_name="tinsmith")
    except TinsmithError as error:
        Console(stderr=True, soft_wrap=True, emoji=False).print(
            f"[bold red]error:[/] {escape(str(error))}", highlight=False
        )
        sys.exit(_EXIT_USAGE)


def build_group(plugins: Plugins) -> typer.Typer:
    """Return the commands, the plugins' own included. Call it with `obj=plugins`."""
    group = typer.Typer(
        help="A self-hosted server for the Tinker API.",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
    )
    group.command("serve", context_settings=_ANY_SETTING)(serve)
    group.command("engine", context_settings=_ANY_SETTING)(engine)
    group.command("check-config", context_settings=_ANY_SETTING)(check_config)
    group.command("replay", context_settings=_ANY_SETTING)(replay)
    runs = typer.Typer(help="Look at runs and their logs.", no_args_is_help=True)
    runs.command("list", context_settings=_ANY_SETTING)(runs_list)
    runs.command("show", context_settings=_ANY_SETTING)(runs_show)
    group.add_typer(runs, name="runs")
    add_plugin_commands(group)
    group.command("demo")(demo)
    add_checkpoint_commands(group)
    group.command("version")(version)
    plugins.add_commands(group)
    return group


def serve(
    context: typer.Context,
    config: ConfigFile = None,
    base_model: BaseModel = None,
    name: Name = None,
    backend: Backend = None,
    host: Annotated[str | None, typer.Option(help="address to listen on; others than loopback need api_keys")] = None,
    port: Annotated[int | None, typer.Option(help="0 picks a free one")] = None,
    data_dir: DataDir = None,
    log_level: LogLevel = None,
) -> None:
    """Serve base models to Tinker clients. Any other setting: --section.key value."""
    from tinsmith.processes.serve import serve as run_server  # here, since `version` needs no web framework

    settings = _settings(
        context,
        config,
        (base_model, name, backend),
        ("--host", "server.host", host),
        ("--port", "server.port", port),
        ("--data-dir", "server.data_dir", data_dir),
        ("--log-level", "server.log_level", log_level),
    )
    run_server(settings, _plugins(context))


def engine(
    context: typer.Context,
    model: Annotated[str, typer.Argument(help="the name of one of the configured models")],
    config: ConfigFile = None,
    base_model: BaseModel = None,
    backend: Backend = None,
    data_dir: DataDir = None,
    log_level: LogLevel = None,
) -> None:
    """Run the engine of one base model by hand, against the store that the server uses."""
    from tinsmith.processes.engine import run_engine

    settings = _settings(
        context,
        config,
        (base_model, None, backend),
        ("--data-dir", "server.data_dir", data_dir),
        ("--log-level", "server.log_level", log_level),
    )
    run_engine(settings, model, _plugins(context))


def replay(
    context: typer.Context,
    run: Annotated[str, typer.Argument(help="which run, as `tinsmith runs list` names it")],
    until: Annotated[int, typer.Option(help="the seq_id of the operation after which the state is wanted")],
    to: Annotated[str, typer.Option(help="a directory, or tinker://RUN/weights/NAME for the SDK to load")],
    accept_differences: Annotated[
        bool, typer.Option("--accept-differences", help="write it although results come out otherwise than recorded")
    ] = False,
    config: ConfigFile = None,
    base_model: BaseModel = None,
    name: Name = None,
    backend: Backend = None,
    data_dir: DataDir = None,
) -> None:
    """Rebuild a run as it was after an operation in its log, and write that as a training checkpoint."""
    from tinsmith.commands.replay import run_replay

    settings = _settings(context, config, (base_model, name, backend), ("--data-dir", "server.data_dir", data_dir))
    run_replay(settings, _plugins(context), run=run, until=until, to=to, accept_differences=accept_differences)


def runs_list(
    context: typer.Context,
    tenant: Annotated[str | None, typer.Option(help="only the runs of this one")] = None,
    limit: Limit = 50,
    offset: Annotated[int, typer.Option(min=0, help="leave out so many of the newest")] = 0,
    json: AsJson = False,
    config: ConfigFile = None,
    data_dir: DataDir = None,
) -> None:
    """List the runs that a server keeps, newest first, while it runs or when it is stopped."""
    from tinsmith.commands.runs import list_runs

    settings = _settings_without_models(context, config, data_dir)
    list_runs(settings, _plugins(context), tenant=tenant, limit=limit, offset=offset, as_json=json)


def runs_show(
    context: typer.Context,
    run: Annotated[str, typer.Argument(help="which run, as `tinsmith runs list` names it")],
    from_: Annotated[
        int | None, typer.Option("--from", min=0, help="the first seq_id to show; default: the last operations")
    ] = None,
    limit: Limit = 50,
    json: AsJson = False,
    config: ConfigFile = None,
    data_dir: DataDir = None,
) -> None:
    """Show a run and the operations in its log: timing, sizes, what came of them, and what has been retried."""
    from tinsmith.commands.runs import show_run

    settings = _settings_without_models(context, config, data_dir)
    show_run(settings, _plugins(context), run=run, from_seq_id=from_, limit=limit, as_json=json)


def check_config(
    context: typer.Context,
    config: ConfigFile = None,
    base_model: BaseModel = None,
    name: Name = None,
    backend: Backend = None,
) -> None:
    """Check the configuration as `serve` would, and print what it comes to. Starts nothing."""
    settings = _settings(context, config, (base_model, name, backend))
    typer.echo(settings.model_dump_json(indent=2))


def demo(
    directory: Annotated[Path, typer.Option(help="for the model, the data and the log")] = Path(".demo"),
    backend: Backend = None,
) -> None:
    """Make a tiny model, serve it, train it with an ordinary Tinker script, sample from it, and stop everything."""
    from tinsmith.commands.demo import run_demo

    raise typer.Exit(run_demo(directory, backend=backend))


def version() -> None:
    """Print the version."""
    typer.echo(f"tinsmith {distribution_version('tinsmith')}")


def _plugins(context: typer.Context) -> Plugins:
    plugins = context.obj
    assert isinstance(plugins, Plugins)
    return plugins


def _settings(
    context: typer.Context,
    config: Path | None,
    model: tuple[str | None, str | None, str | None],
    *short: tuple[str, str, object],
) -> Settings:
    base_model, name, backend = model
    flags = settings_flags(base_model=base_model, base_model_name=name, backend=backend, short=short, rest=context.args)
    return load_settings(_plugins(context), file=config, environ=os.environ, flags=flags)


def _settings_without_models(context: typer.Context, config: Path | None, data_dir: Path | None) -> Settings:
    """For commands that look at the data directory alone."""
    flags = settings_flags(short=[("--data-dir", "server.data_dir", data_dir)], rest=context.args)
    return load_settings(_plugins(context), file=config, environ=os.environ, flags=flags, needs_models=False)
