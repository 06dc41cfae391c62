"""`tinsmith worker`: the workers of one machine, for a scheduler that starts one program on each."""

from __future__ import annotations

import os
from typing import Annotated

import typer

from tinsmith.errors import ConfigError
from tinsmith_workers.host import run_host
from tinsmith_workers.keys import shared_key


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
