"""The `tinsmith` command line. Commands parse and print; the work is in the modules they call."""

from __future__ import annotations

import os
import sys
from importlib.metadata import version as distribution_version
from pathlib import Path
from typing import Annotated, Any, Final, cast

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from tinsmith.errors import TinsmithError
from tinsmith.flags import settings_flags
from tinsmith.plugins import Plugins
from tinsmith.settings import Settings
from tinsmith.settings_loading import load_settings
from tinsmith.tiny_model import Family, TinyShape, write_tiny_model

_EXIT_USAGE: Final = 2
_TINY: Final = TinyShape()
_ANY_SETTING: Final[dict[str, Any]] = {"allow_extra_args": True, "ignore_unknown_options": True}  # Any: click's

ConfigFile = Annotated[Path | None, typer.Option("--config", "-c", help="YAML file; see docs/how-to/configure.md")]
BaseModel = Annotated[
    str | None, typer.Option(help="Hugging Face directory (or cached name) of the one model to serve")
]
Name = Annotated[str | None, typer.Option(help="what clients pass as base_model; default: the directory itself")]
Backend = Annotated[str | None, typer.Option(help="which installed backend trains the first model")]
DataDir = Annotated[Path | None, typer.Option(help="where the database and checkpoints live")]
LogLevel = Annotated[str | None, typer.Option(help="debug, info, warning or error")]


def app() -> None:
    """Run the command line; errors meant for people go to stderr without a traceback, with exit code 2."""
    plugins = Plugins.load()
    group = build_group(plugins)
    try:
        group(obj=plugins, prog_name="tinsmith")
    except TinsmithError as error:
        Console(stderr=True, soft_wrap=True).print(f"[bold red]error:[/] {escape(str(error))}", highlight=False)
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
    group.command("plugins")(list_plugins)
    group.command("tiny-model")(tiny_model)
    group.command("demo")(demo)
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
    from tinsmith.serving import serve as run_server  # here, since `version` needs no web framework

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
    from tinsmith.engine_process import run_engine

    settings = _settings(
        context,
        config,
        (base_model, None, backend),
        ("--data-dir", "server.data_dir", data_dir),
        ("--log-level", "server.log_level", log_level),
    )
    run_engine(settings, model, _plugins(context))


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


def list_plugins(context: typer.Context) -> None:
    """List every plugin: where it comes from, what it offers, and why it is broken where it is."""
    table = Table("plugin", "distribution", "version", "offers", box=None, pad_edge=False, header_style="bold")
    rows = _plugins(context).report()
    for row in rows:
        offers = ", ".join(row.offers) or "-"
        name, shown = (f"[red]{escape(row.name)}[/]", f"[red]{escape(row.error)}[/]") if row.error else (row.name, "")
        told = "\n".join(part for part in (escape(offers) if row.offers or not row.error else "", shown) if part)
        table.add_row(name, escape(row.distribution), escape(row.version), told)
    Console(width=None if sys.stdout.isatty() else 200).print(table, highlight=False)


def tiny_model(
    directory: Annotated[Path, typer.Argument(help="where to write it")],
    family: Annotated[str, typer.Option(help="qwen3 or llama")] = "qwen3",
    vocab_size: int = _TINY.vocab_size,
    hidden_size: int = _TINY.hidden_size,
    intermediate_size: int = _TINY.intermediate_size,
    num_layers: int = _TINY.num_layers,
    num_heads: int = _TINY.num_heads,
    num_kv_heads: int = _TINY.num_kv_heads,
    head_dim: int = _TINY.head_dim,
    max_context_tokens: int = _TINY.max_context_tokens,
    tied: Annotated[bool, typer.Option(help="use the embedding as output head")] = True,
    seed: int = _TINY.seed,
    force: Annotated[bool, typer.Option("--force", help="overwrite what is there")] = False,
) -> None:
    """Write a tiny random model with a tokenizer, in Hugging Face format: for trying things out."""
    shape = TinyShape(
        family=cast("Family", family),
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=intermediate_size,
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        max_context_tokens=max_context_tokens,
        tied=tied,
        seed=seed,
    )
    num_parameters = write_tiny_model(directory, shape, overwrite=force)
    typer.echo(f"wrote a {family} with {num_parameters:,} random parameters to {directory}")


def demo(
    directory: Annotated[Path, typer.Option(help="for the model, the data and the log")] = Path(".demo"),
    backend: Backend = None,
) -> None:
    """Make a tiny model, serve it, train it with an ordinary Tinker script, sample from it, and stop everything."""
    from tinsmith.demo import run_demo

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
