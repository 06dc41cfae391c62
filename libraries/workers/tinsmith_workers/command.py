"""`tinsmith worker`: the workers of one machine, for a scheduler that starts one program on each."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Annotated, Final

import typer

from tinsmith.errors import ConfigError
from tinsmith.lifeline import Tethered
from tinsmith.settings.environment import child_environment
from tinsmith_workers.launching import (
    COORDINATOR,
    INDEX,
    KEY,
    NUM_WORKERS,
    WAIT_S,
    WITH_PARENT,
    shared_key,
    worker_environment,
)

_PAUSE_S: Final = 2.0  # before workers join again
_POLL_S: Final = 0.1


def worker(
    coordinator: Annotated[
        str, typer.Option(metavar="HOST:PORT", help="the engine: its backend's `control_address`", show_default=False)
    ],
    processes: Annotated[int, typer.Option(min=1, help="workers on this machine: the backend's `nproc_per_node`")] = 1,
    index: Annotated[
        int | None,
        typer.Option(
            min=0,
            help="number of this machine, from 0; default: any",
            envvar=["JOB_COMPLETION_INDEX", "SLURM_NODEID"],
            show_default=False,
        ),
    ] = None,
    wait: Annotated[float, typer.Option(min=0, help="seconds to wait for the engine to listen")] = 900.0,
    again: Annotated[bool, typer.Option("--again", help="join again whenever the workers end, until killed")] = False,
) -> None:
    """Run this machine's workers for a backend with `launcher: scheduler`.

    TINSMITH_WORKER_KEY must be set to the secret that the engine has in the same variable, 32 random
    characters or more.
    """
    shared_key(os.environ)
    if not coordinator.rpartition(":")[2].isdecimal():
        msg = f"--coordinator {coordinator!r} is not HOST:PORT; give the backend's control_address"
        raise ConfigError(msg)
    raise typer.Exit(run_host(coordinator, processes=processes, index=index, wait_s=wait, again=again))


def run_host(coordinator: str, *, processes: int, index: int | None, wait_s: float, again: bool) -> int:
    """Run this machine's workers until they end. Returns the exit status: 0 if the engine has asked them to end.

    index: of this machine; None: any. again: when they end, for whatever reason, join the next group; never return.
    If one fails, the others are ended.
    """
    environment = {
        **worker_environment(child_environment(keep=[KEY])),
        COORDINATOR: coordinator,
        WAIT_S: str(wait_s),
        WITH_PARENT: "1",
    }
    for name in (INDEX, NUM_WORKERS):
        environment.pop(name, None)  # whatever they say, it is not about these processes
    while True:
        with _started(environment, processes, index) as workers:
            status = _first_failure(workers)
        if not again:
            return status
        time.sleep(_PAUSE_S)


@contextmanager
def _started(environment: dict[str, str], processes: int, index: int | None) -> Iterator[Sequence[Tethered]]:
    ranks = [None if index is None else index * processes + local for local in range(processes)]
    workers = [
        Tethered(
            [sys.executable, "-m", "tinsmith_workers"],
            env=environment if rank is None else {**environment, INDEX: str(rank)},
        )
        for rank in ranks
    ]
    try:
        yield workers
    finally:
        for worker in workers:
            worker.kill()
        for worker in workers:
            worker.end()


def _first_failure(workers: Sequence[Tethered]) -> int:
    """Wait until all have ended, or one has failed. Returns its status as a shell would."""
    while True:
        codes = [worker.poll() for worker in workers]
        failed = next((code for code in codes if code), 0)
        if failed:
            return 128 - failed if failed < 0 else failed
        if None not in codes:
            return 0
        time.sleep(_POLL_S)
