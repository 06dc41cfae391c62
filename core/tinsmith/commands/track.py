"""`tinsmith track`: metrics that a script writes to a file, added to the curves of its run.

Each line of a `metrics.jsonl` is an object with `step` and the metrics of that step.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, BinaryIO, Final

import typer

from tinsmith.commands.client import DEFAULT_KEY, DEFAULT_URL, ApiKey, ServerUrl, get_json
from tinsmith.errors import UserError
from tinsmith.tracking import Point, Tracker

_AT_ONCE: Final = 500  # steps
_LOOK_EVERY_S: Final = 1.0


def track(
    log_dir: Annotated[Path, typer.Argument(help="directory of `metrics.jsonl`, as the cookbook writes it")],
    run: Annotated[str, typer.Option(help="id of the run; `last`: the newest of this key")] = "last",
    url: ServerUrl = DEFAULT_URL,
    key: ApiKey = DEFAULT_KEY,
    once: Annotated[bool, typer.Option("--once", help="end at the end of the file, instead of following it")] = False,
) -> None:
    """Add the metrics of a log directory to a run, and follow the file until Ctrl-C. Starting again repeats nothing."""
    file = log_dir / "metrics.jsonl"
    if once and not file.exists():
        msg = f"there is no {str(file)!r}; pass the log directory of a recipe of the cookbook"
        raise UserError(msg)
    tracker = Tracker(url, key, _newest_run(url, key) if run == "last" else run)
    typer.echo(f"adding {file} to run {tracker.run_id}")
    while not file.exists():
        time.sleep(_LOOK_EVERY_S)
    with file.open("rb") as stream:
        while True:
            for points in _batches(stream):
                _send(tracker, points)
            if once:
                return
            time.sleep(_LOOK_EVERY_S)


def _newest_run(url: str, key: str) -> str:
    runs = get_json(url, "/api/v1/runs?limit=1&access_scope=owned", key)["runs"]
    if not runs:
        msg = f"{url} has no run of this key; start the script first, or pass --run"
        raise UserError(msg)
    return str(runs[0]["run_id"])


def _send(tracker: Tracker, points: list[Point]) -> None:
    try:
        tracker.log_many(points)
    except ValueError as error:
        raise UserError(str(error)) from error


def _batches(stream: BinaryIO) -> Iterator[list[Point]]:
    """Yield the steps of whole lines. The place of a line that is still being written is kept."""
    points: list[Point] = []
    while True:
        at = stream.tell()
        line = stream.readline()
        if not line.endswith(b"\n"):
            stream.seek(at)
            break
        if (point := point_of(line)) is not None:
            points.append(point)
        if len(points) == _AT_ONCE:
            yield points
            points = []
    if points:
        yield points


def point_of(line: bytes) -> Point | None:
    """Return the step and the numbers of a line; None if it has no step or no number."""
    try:
        content: Any = json.loads(line)
    except ValueError as error:
        msg = f"a line of the metrics is no JSON: {line[:80]!r}"
        raise UserError(msg) from error
    step = content.get("step") if isinstance(content, dict) else None
    if not isinstance(step, int):
        return None
    values = {
        name: float(value) if value is not None else math.nan
        for name, value in content.items()
        if name != "step" and (value is None or isinstance(value, int | float))
    }
    return (step, values) if values else None
