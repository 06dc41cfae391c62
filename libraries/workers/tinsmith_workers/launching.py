"""Launchers of worker processes: the interface, and the launchers that need no other package.

A launcher only starts processes. Each finds the engine by its address and key, and everything else is said there.
"""

import subprocess
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol

from tinsmith.errors import ConfigError
from tinsmith.lifeline import Tethered
from tinsmith.settings.environment import WORKER_KEY, child_environment
from tinsmith_workers.config import WorkersConfig

KEY: Final = WORKER_KEY
"""Environment variable: the secret that the engine and its workers share."""

COORDINATOR: Final = "TINSMITH_COORDINATOR"
"""Environment variable: the engine's address, `unix:<path>` or `<host>:<port>`."""

INDEX: Final = "TINSMITH_WORKER_INDEX"
"""Environment variable: the worker's rank, if its starter chooses one."""

NUM_WORKERS: Final = "TINSMITH_NUM_WORKERS"
"""Environment variable: the number of workers, if the starter knows it."""

DEVICE: Final = "TINSMITH_WORKER_DEVICE"
"""Environment variable: `cpu` or `cuda`, on which a worker that trains with torch computes; default a GPU if there is
one."""

WAIT_S: Final = "TINSMITH_WORKER_WAIT_S"
"""Environment variable: for how long a worker waits for the engine to listen; default not at all."""

WITH_PARENT: Final = "TINSMITH_WORKER_WITH_PARENT"
"""Environment variable: if set, standard input is a pipe that closes when the worker's starter has gone."""

_STOP_S: Final = 5.0
_MIN_CHARACTERS: Final = 32  # of a key; of 16 different ones, as in hexadecimal, they are 128 bits
_MIN_DIFFERENT: Final = 8  # a random one of that length hardly ever has fewer


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """The processes to start."""

    config: WorkersConfig
    environment: Mapping[str, str]  # for each worker, in addition to its machine's
    directory: Path  # for the launcher's own files
    gpus: bool | None  # whether each worker takes a GPU; None: if there are any
    default_per_node: int  # if `nproc_per_node` is not set

    @property
    def per_node(self) -> int:
        return self.config.nproc_per_node or self.default_per_node

    @property
    def num_workers(self) -> int:
        return self.config.nnodes * self.per_node


class Launcher(Protocol):
    """A launcher that has started the workers."""

    num_workers: int | None  # None: the workers know

    def ended(self) -> str | None:
        """Return how it ended, or None while the workers run."""

    def close(self) -> None:
        """End what is left. The workers have ended, or will end at once, because their connections are closed."""


MakeLauncher = Callable[[Launch], Launcher]


ALLOCATOR: Final = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
"""Both names of torch's setting, from 2.11 to 2.13; the first one overrules the second."""


def worker_environment(machines: Mapping[str, str]) -> dict[str, str]:
    """Return a machine's environment for its workers. Variables that the operator has set stay.

    Each packing of sequences has new sizes: with expandable segments, the memory that torch has freed fits them. They
    are for workers alone, as vLLM refuses them if it is to sleep.
    """
    defaults = {"OMP_NUM_THREADS": "1"}
    if not any(name in machines for name in ALLOCATOR):
        defaults[ALLOCATOR[0]] = "expandable_segments:True"
    return {**defaults, **machines}


class LocalProcesses:
    """A process for each worker, on this machine. They end when this process does."""

    def __init__(self, launch: Launch) -> None:
        self.num_workers: int | None = launch.num_workers
        own = {**launch.environment, NUM_WORKERS: str(launch.num_workers), WITH_PARENT: "1"}
        shared = {**worker_environment(child_environment()), **own}
        self._processes = [
            Tethered([sys.executable, "-m", "tinsmith_workers"], env={**shared, INDEX: str(index)})
            for index in range(launch.num_workers)
        ]

    def ended(self) -> str | None:
        codes = {index: code for index, each in enumerate(self._processes) if (code := each.poll()) is not None}
        return ", ".join(f"worker {index} left with {code}" for index, code in codes.items()) or None

    def close(self) -> None:
        for process in self._processes:
            with suppress(subprocess.TimeoutExpired):
                process.wait(_STOP_S)
            process.end()


class Scheduler:
    """Starts nothing: something else runs `tinsmith worker` on each machine, and again whenever it ends."""

    def __init__(self, launch: Launch) -> None:
        self.num_workers: int | None = launch.num_workers

    def ended(self) -> str | None:
        return None

    def close(self) -> None:
        """Leave ending the workers to the program that started them."""


def shared_key(environment: Mapping[str, str]) -> str:
    """Return the secret. Raises ConfigError if it is missing, or short enough to be guessed from a recorded proof."""
    key = environment.get(KEY)
    remedy = "set it to the same output of `openssl rand -hex 32` for the engine and its workers on all machines"
    if key is None:
        msg = f"{KEY} is not set: {remedy}"
        raise ConfigError(msg)
    if len(key) < _MIN_CHARACTERS:
        msg = f"{KEY} has {len(key)} characters, and must have at least {_MIN_CHARACTERS}: {remedy}"
        raise ConfigError(msg)
    if len(set(key)) < _MIN_DIFFERENT:
        msg = f"{KEY} has {len(set(key))} different characters, and must have at least {_MIN_DIFFERENT}: {remedy}"
        raise ConfigError(msg)
    return key
