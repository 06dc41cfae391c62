"""`tinsmith runs` and `replay`: the runs that a server keeps, their logs, and their past states.

Each command of `runs` reads plain values, and prints them as they are with --json, else as tables.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Annotated

import typer

from tinsmith.commands.client import DEFAULT_KEY, URL_VARIABLE, ApiKey
from tinsmith.commands.open_store import find_run, use_store
from tinsmith.commands.options import (
    ANY_SETTING,
    AsJson,
    Backend,
    BaseModel,
    ConfigFile,
    DataDir,
    Name,
    plugins_of,
    settings_of,
    settings_without_models,
)
from tinsmith.errors import UserError

if TYPE_CHECKING:
    from pathlib import Path

    from tinsmith.protocol import wire
    from tinsmith.store import RequestStore

Run = Annotated[
    str,
    typer.Argument(help="id of the run (see `tinsmith runs list`), or a unique beginning of one; `last`: the newest"),
]
Url = Annotated[
    str | None,
    typer.Option(
        help="URL of a running server to ask, from any machine; default: $TINKER_BASE_URL, unless a data directory or "
        "a configuration is given; without either, read the data directory"
    ),
]
Limit = Annotated[int, typer.Option(min=1, max=10_000, help="number of rows to print")]


def add_run_commands(group: typer.Typer) -> None:
    group.command("replay", context_settings=ANY_SETTING)(replay)
    commands = typer.Typer(help="List runs, and show their logs.", no_args_is_help=True)
    commands.command("list", context_settings=ANY_SETTING)(list_runs)
    commands.command("show", context_settings=ANY_SETTING)(show_run)
    group.add_typer(commands, name="runs")


def _server_meant(context: typer.Context, url: str | None, config: Path | None, data_dir: Path | None) -> str | None:
    """Return the URL of the server to ask; None: read the data directory. What is typed precedes the environment."""
    reads_directory = config is not None or data_dir is not None or bool(context.args)
    if url is not None and reads_directory:
        msg = "--url asks a server, and --data-dir, --config and settings say which directory to read; pass one of both"
        raise UserError(msg)
    return url if url is not None or reads_directory else os.environ.get(URL_VARIABLE) or None


def list_runs(
    context: typer.Context,
    tenant: Annotated[str | None, typer.Option(help="list only the runs of this tenant")] = None,
    limit: Limit = 50,
    offset: Annotated[int, typer.Option(min=0, help="number of the newest runs to skip")] = 0,
    json: AsJson = False,
    url: Url = None,
    key: ApiKey = DEFAULT_KEY,
    config: ConfigFile = None,
    data_dir: DataDir = None,
) -> None:
    """List the runs that a server keeps, newest first. Works while the server runs and when it is stopped."""
    from tinsmith.commands.runs_of_server import RunsOfServer  # these imports are here: other commands need none
    from tinsmith.commands.runs_tables import print_json, print_runs
    from tinsmith.server.run_views import list_summaries
    from tinsmith.server.waits import read_waits

    url = _server_meant(context, url, config, data_dir)
    if url is not None:
        page, where = RunsOfServer(url, key).list(tenant, limit=limit, offset=offset), url
    else:
        settings, plugins = settings_without_models(context, config, data_dir), plugins_of(context)

        async def read(store: RequestStore) -> wire.RunSummaries:
            waits = await read_waits(store, settings.quotas)
            return await list_summaries(store, tenant, waits, limit=limit, offset=offset)

        page = use_store(settings, plugins, read)
        where = str(settings.server.data_dir)
    if json:
        print_json(page.model_dump(mode="json", exclude_none=True))
    else:
        print_runs(page, tenant=tenant, offset=offset, where=where)


def show_run(
    context: typer.Context,
    run: Run,
    from_: Annotated[
        int | None, typer.Option("--from", min=0, help="seq_id of the first operation to print; default: the last ones")
    ] = None,
    limit: Limit = 50,
    json: AsJson = False,
    url: Url = None,
    key: ApiKey = DEFAULT_KEY,
    config: ConfigFile = None,
    data_dir: DataDir = None,
) -> None:
    """Show a run and the operations in its log: times, sizes, results and retries, and how far back replay can go."""
    from tinsmith.commands.runs_of_server import RunsOfServer
    from tinsmith.commands.runs_tables import print_json, print_run
    from tinsmith.server.run_report import report
    from tinsmith.server.waits import read_waits

    url = _server_meant(context, url, config, data_dir)
    if url is not None:
        found = RunsOfServer(url, key).show(run, from_seq_id=from_, limit=limit)
    else:
        settings, plugins = settings_without_models(context, config, data_dir), plugins_of(context)

        async def read(store: RequestStore) -> wire.RunReport:
            waits = await read_waits(store, settings.quotas)
            return await report(store, await find_run(store, run), None, waits, from_seq_id=from_, limit=limit)

        found = use_store(settings, plugins, read)
    if json:
        print_json(found.model_dump(mode="json"))
    else:
        print_run(found)


def replay(
    context: typer.Context,
    run: Run,
    until: Annotated[int, typer.Option(help="seq_id of the last operation to replay")],
    to: Annotated[
        str, typer.Option(help="where to write the checkpoint: a directory, or tinker://RUN/weights/NAME for the SDK")
    ],
    accept_differences: Annotated[
        bool, typer.Option("--accept-differences", help="write the checkpoint even if results differ from the log")
    ] = False,
    config: ConfigFile = None,
    base_model: BaseModel = None,
    name: Name = None,
    backend: Backend = None,
    data_dir: DataDir = None,
) -> None:
    """Rebuild a run as it was after an operation in its log, and write that state as a training checkpoint."""
    from tinsmith.commands.replay import run_replay

    settings = settings_of(
        context,
        config,
        ("--data-dir", "server.data_dir", data_dir),
        base_model=base_model,
        name=name,
        backend=backend,
    )
    run_replay(settings, plugins_of(context), run=run, until=until, to=to, accept_differences=accept_differences)
