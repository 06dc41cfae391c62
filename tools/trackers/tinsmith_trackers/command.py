"""`tinsmith-trackers TRACKER`: copy the curves of a server's runs, and follow them."""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.metadata import entry_points
from pathlib import Path
from typing import Annotated, Final, TypeVar

import typer

from tinsmith_trackers.copying import Copying
from tinsmith_trackers.loopback import exempt_loopback
from tinsmith_trackers.positions import Positions
from tinsmith_trackers.server import Server, UnreachableError
from tinsmith_trackers.tracker import Destination, Tracker, TrackerError

T = TypeVar("T")
Url = Annotated[str, typer.Option(envvar="TINKER_BASE_URL", help="URL of the server")]
Key = Annotated[str, typer.Option(envvar="TINKER_API_KEY", help="API key whose runs are meant")]

GROUP: Final = "tinsmith.trackers"
_LEAST_S: Final = 0.5
_EXIT_USAGE: Final = 2
_EXIT_FAILED: Final = 1


def main() -> None:
    exempt_loopback(os.environ)
    typer.run(trackers)


def trackers(
    tracker: Annotated[str, typer.Argument(help="where to: wandb, mlflow, tensorboard, trackio, or one of a plugin")],
    project: Annotated[str, typer.Option(help="project there; MLflow calls it an experiment")] = "tinsmith",
    directory: Annotated[
        Path | None, typer.Option("--dir", help="directory of the files, for TensorBoard and W&B")
    ] = None,
    run: Annotated[
        list[str] | None, typer.Option(help="id of a run, or its beginning; default: all of the key")
    ] = None,
    url: Url = "http://127.0.0.1:8000",
    key: Key = "tml-local",
    once: Annotated[bool, typer.Option("--once", help="copy what is there and end, instead of following it")] = False,
    every: Annotated[float, typer.Option(min=_LEAST_S, help="seconds between two looks at the server")] = 5.0,
    state: Annotated[
        Path | None, typer.Option(help="file that says what has been copied; default: one per server and tracker")
    ] = None,
) -> None:
    """Copy the curves of runs to an experiment tracker, and follow them until Ctrl-C. Starting again goes on there."""
    with told_to_people():
        chosen = _load(tracker, Destination(project=project, directory=directory))
        file = state or _state_file(f"{tracker} {url} {chosen.place}")
        server = Server(url, key)
        try:
            copying = Copying(server, chosen, Positions(file), only=run or ())
            _patiently(copying.look_for, once=once, every_s=every)
            typer.echo(f"copying from {url} to {tracker}, project {project}; {file} says how far", err=True)
            _follow(copying, once=once, every_s=every)
        finally:
            server.close()


def _follow(copying: Copying, *, once: bool, every_s: float) -> None:
    total = 0
    try:
        while True:
            copied = _patiently(lambda: copying.round(last=once), once=once, every_s=every_s)
            total += copied
            if copied:
                typer.echo(f"{copied} values", err=True)
            if once:
                return
            time.sleep(every_s)
    except KeyboardInterrupt:
        typer.echo(f"stopped; {total} values copied", err=True)
    finally:
        copying.close()


def _patiently(ask: Callable[[], T], *, once: bool, every_s: float) -> T:
    """Ask until the server answers. With `once`, raise TrackerError if it does not."""
    is_told = False
    while True:
        try:
            return ask()
        except UnreachableError as error:
            if once:
                raise TrackerError(str(error)) from error
            if not is_told:
                typer.echo(f"{error}; trying again", err=True)
                is_told = True
            time.sleep(every_s)


def _load(name: str, destination: Destination) -> Tracker:
    """Raise TrackerError if nobody offers a tracker of that name, or its package is missing."""
    offered = {point.name: point for point in entry_points(group=GROUP)}
    if name not in offered:
        msg = f"there is no tracker {name!r}; installed: {', '.join(sorted(offered))}"
        raise TrackerError(msg)
    try:
        tracker: Tracker = offered[name].load()(destination)
    except ModuleNotFoundError as error:
        msg = f"the tracker {name!r} needs {error.name}: pip install 'tinsmith-trackers[{name}]'"
        raise TrackerError(msg) from error
    return tracker


def _state_file(of: str) -> Path:
    words = "".join(letter if letter.isalnum() else "-" for letter in of)
    digest = hashlib.sha256(of.encode()).hexdigest()[:12]
    return Path(typer.get_app_dir("tinsmith-trackers")) / f"{words[:80].strip('-')}-{digest}.json"


@contextmanager
def told_to_people() -> Iterator[None]:
    try:
        yield
    except TrackerError as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(_EXIT_USAGE) from error
    except KeyboardInterrupt as error:
        raise typer.Exit(_EXIT_FAILED) from error


if __name__ == "__main__":
    main()
