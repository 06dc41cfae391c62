"""`tinsmith session`: what a running server knows of a client's session."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tinsmith.commands.client import DEFAULT_KEY, DEFAULT_URL, ApiKey, ServerUrl, download, get_json
from tinsmith.errors import UserError


def add_session_commands(group: typer.Typer) -> None:
    commands = typer.Typer(help="Look at a client's session.", no_args_is_help=True)
    commands.callback()(_session)
    commands.command("export-trace")(export_trace)
    group.add_typer(commands, name="session")


def _session() -> None:
    """Look at a client's session."""


def export_trace(
    session: Annotated[str, typer.Argument(help="id of the session: what a run's id begins with, up to the colon")],
    output: Annotated[Path | None, typer.Option(help="file to write; default: SESSION.trace.json")] = None,
    url: ServerUrl = DEFAULT_URL,
    key: ApiKey = DEFAULT_KEY,
) -> None:
    """Write where the time of a session's runs went, as a trace for https://ui.perfetto.dev."""
    file = output or Path(f"{session}.trace.json")
    link = get_json(url, f"/api/v1/sessions/{session}/trace_export", key)["url"]
    try:
        file.write_bytes(download(link))
    except OSError as error:
        msg = f"--output: {str(file)!r} cannot be written: {error.strerror}"
        raise UserError(msg) from error
    typer.echo(f"wrote {file}; open it in https://ui.perfetto.dev")
