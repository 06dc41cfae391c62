"""`tinsmith track`: metrics that a script writes to a file, added to the curves of its run.

Each line of a `metrics.jsonl` is an object with `step` and the metrics of that step.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, BinaryIO, Final

import typer

from tinsmith_trackers.command import Key, Url, told_to_people
from tinsmith_trackers.server import Server, UnreachableError
from tinsmith_trackers.tracker import TrackerError
from tinsmith_trackers.tracking import Point, ScriptLog

_AT_ONCE: Final = 500  # steps
_LOOK_EVERY_S: Final = 1.0
_NAMED: Final = 3  # runs, in a message
LAST: Final = "last"


def track(
    log_dir: Annotated[Path, typer.Argument(help="directory of `metrics.jsonl`, as the cookbook writes it")],
    run: Annotated[str | None, typer.Option(help="id of the run, required; `last`: the newest of this key")] = None,
    url: Url = "http://127.0.0.1:8000",
    key: Key = "tml-local",
    once: Annotated[bool, typer.Option("--once", help="end at the end of the file, instead of following it")] = False,
) -> None:
    """Add the metrics of a log directory to a run, and follow the file until Ctrl-C. Starting again repeats nothing.

    A line that is no JSON, such as one cut off by a crash, is left out with a warning. A file that is replaced or
    emptied is read from its beginning.
    """
    with told_to_people():
        _follow(log_dir / "metrics.jsonl", run, url, key, once=once)


def _follow(file: Path, run: str | None, url: str, key: str, *, once: bool) -> None:
    if once and not file.exists():
        msg = f"there is no {str(file)!r}; pass the log directory of a recipe of the cookbook"
        raise TrackerError(msg)
    tracker = ScriptLog(url, key, _run_meant(run, url, key))
    typer.echo(f"adding {file} to run {tracker.run_id}")
    while True:
        while not file.exists():
            time.sleep(_LOOK_EVERY_S)
        with file.open("rb") as stream:
            while True:
                for points in _batches(stream):
                    _send(tracker, points)
                if once:
                    return
                if _is_replaced(file, stream):
                    break
                time.sleep(_LOOK_EVERY_S)
        typer.echo(f"{file} is another file now, or shorter; reading it from its beginning", err=True)


def _run_meant(run: str | None, url: str, key: str) -> str:
    """Return the id. A script whose run has not begun yet may be meant, so no run is taken unless it is named."""
    if run not in (None, LAST):
        return run
    server = Server(url, key)
    try:
        newest = server.newest(_NAMED)
    except UnreachableError as error:
        raise TrackerError(str(error)) from error
    finally:
        server.close()
    if not newest:
        msg = f"{url} has no run of this key; start the script first"
        raise TrackerError(msg)
    if run is None:
        named = ", ".join(f"{each['run_id']} (created {each['created_at']})" for each in newest)
        msg = f"--run says which run these metrics are of; the newest of this key: {named}; or pass --run {LAST}"
        raise TrackerError(msg)
    return str(newest[0]["run_id"])


def _is_replaced(file: Path, stream: BinaryIO) -> bool:
    """Return whether the path names another file by now, or the file has lost what was read."""
    read = os.fstat(stream.fileno())
    try:
        named = file.stat()
    except FileNotFoundError:  # the next one may come
        return False
    return (named.st_dev, named.st_ino) != (read.st_dev, read.st_ino) or read.st_size < stream.tell()


def _send(tracker: ScriptLog, points: list[Point]) -> None:
    try:
        tracker.log_many(points)
    except ValueError as error:
        raise TrackerError(str(error)) from error


def _batches(stream: BinaryIO) -> Iterator[list[Point]]:
    """Yield the steps of whole lines. The place of a line that is still being written is kept."""
    points: list[Point] = []
    while True:
        at = stream.tell()
        line = stream.readline()
        if not line.endswith(b"\n"):
            stream.seek(at)
            break
        try:
            point = point_of(line)
        except ValueError:
            shown = line[:80].decode(errors="replace").rstrip().encode("unicode_escape").decode()
            typer.echo(f"left out, no JSON: the line at byte {at}: {shown}", err=True)
            continue
        if point is not None:
            points.append(point)
        if len(points) == _AT_ONCE:
            yield points
            points = []
    if points:
        yield points


def point_of(line: bytes) -> Point | None:
    """Return the step and the numbers of a line; None if it has no step or no number.

    Raise ValueError if it is no JSON, or nested too deeply.
    """
    try:
        content: Any = json.loads(line)
    except RecursionError as error:
        msg = "it is nested too deeply"
        raise ValueError(msg) from error
    step = content.get("step") if isinstance(content, dict) else None
    if not isinstance(step, int):
        return None
    values = {
        name: float(value) if value is not None else math.nan
        for name, value in content.items()
        if name != "step" and (value is None or isinstance(value, int | float))
    }
    return (step, values) if values else None
