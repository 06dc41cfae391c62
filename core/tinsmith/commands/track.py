"""`tinsmith track`: metrics that a script writes to a file, added to the curves of its run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def add_track_command(group: typer.Typer) -> None:
    group.command("track")(track)


def track(
    log_dir: Annotated[Path, typer.Argument(help="directory of `metrics.jsonl`, as the cookbook writes it")],
    run: Annotated[str, typer.Option(help="id of the run; `last`: the newest of this key")] = "last",
    url: Annotated[str, typer.Option(envvar="TINKER_BASE_URL", help="URL of the server")] = "http://127.0.0.1:8000",
    key: Annotated[str, typer.Option(envvar="TINKER_API_KEY", help="API key of the run's tenant")] = "tml-local",
    once: Annotated[bool, typer.Option("--once", help="end at the end of the file, instead of following it")] = False,
) -> None:
    """Add the metrics of a log directory to a run, and follow the file until Ctrl-C. Starting again repeats nothing."""
    from tinsmith.commands.follow_metrics import follow

    follow(log_dir / "metrics.jsonl", run=run, url=url, key=key, once=once)
