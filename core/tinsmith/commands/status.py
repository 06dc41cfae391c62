"""`tinsmith status` and `top`: what a running server does, once or live."""

from __future__ import annotations

import sys
import time
from typing import Annotated, Final

import typer

from tinsmith.commands.client import DEFAULT_KEY, DEFAULT_URL, ApiKey, ServerUrl, get, get_json
from tinsmith.commands.options import AsJson
from tinsmith.errors import UserError

_EXIT_TROUBLE: Final = 1
_ENGINES: Final = "/api/v1/engines"
_RUNS: Final = "/api/v1/runs"


def add_status_commands(group: typer.Typer) -> None:
    group.command("status")(status)
    group.command("top")(top)


def status(url: ServerUrl = DEFAULT_URL, key: ApiKey = DEFAULT_KEY, json: AsJson = False) -> None:
    """Show what a running server does: engines, queues by tenant, what waits and why, places, disk, failures.

    Exit with 0 if every engine is ready and requests can be recorded, with 1 if not, with 2 if no server answers.
    """
    from tinsmith.commands.status_tables import console, print_status, trouble
    from tinsmith.protocol import wire  # here, because `version` needs no wire

    answer = get_json(url, _ENGINES, key)
    found = wire.EngineList.model_validate(answer)
    if json:
        typer.echo(found.model_dump_json(indent=2, exclude_none=True))
    else:
        print_status(console(), url, found)
    if trouble(found):
        raise typer.Exit(_EXIT_TROUBLE)


def top(
    url: ServerUrl = DEFAULT_URL,
    key: ApiKey = DEFAULT_KEY,
    every: Annotated[float, typer.Option(min=0.5, max=3600, help="seconds between two looks")] = 2.0,
) -> None:
    """Show what a running server does, live, with tokens per second and what each of the newest runs waits for.

    Ctrl-C ends it. Without a terminal, look once.
    """
    from rich.live import Live

    from tinsmith.commands.status_tables import Rates, console, rendered, unreachable
    from tinsmith.protocol import wire

    terminal, rates = console(), Rates()

    def look() -> object:
        rates.add(get(url, "/metrics", key).decode(), time.monotonic())
        runs = wire.RunSummaries.model_validate(get_json(url, _RUNS, key)).runs
        return rendered(url, wire.EngineList.model_validate(get_json(url, _ENGINES, key)), rates, runs)

    first = look()  # raises if there is no such server
    if not sys.stdout.isatty():
        terminal.print(first)
        return
    try:
        with Live(first, console=terminal, auto_refresh=False, screen=True) as live:  # type: ignore[arg-type]  # is renderable
            while True:
                time.sleep(every)
                try:
                    shown = look()
                except UserError as error:  # it may be starting again
                    shown = unreachable(error)
                live.update(shown, refresh=True)  # type: ignore[arg-type]  # is renderable
    except KeyboardInterrupt:
        return
