"""A launcher for tests whose workers start at once: forked from a process that has imported what they need.

Importing a framework takes longer than most tests. What runs is the same program as ever, in processes of its own.

Run as a program, this module is the process that forks. It reads requests as lines of JSON from its standard input and
answers each with a line. When its standard input closes, it kills its workers and exits.
"""

import atexit
import gc
import json
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any, Final

from tinsmith.failpoints import VARIABLE
from tinsmith_workers.launching import INDEX, NUM_WORKERS, Launch

_STOP_S: Final = 60.0
_FRUGAL: Final = {
    "MALLOC_ARENA_MAX": "1",  # each further arena reserves 64 MiB of address space
    "MALLOC_MMAP_THRESHOLD_": str(1 << 20),  # without it, glibc keeps freed blocks of up to 32 MiB for later ones
}
"""Settings of glibc for tests of memory, which count address space and limit it."""


class Nursery:
    """The process that forks. It ends with this one."""

    def __init__(self, *modules: str) -> None:
        """Start it, and have it import these modules. Pass `launch` as the `launch_with` of a group."""
        environment = {"OMP_NUM_THREADS": "1", **os.environ, "PYTHONSAFEPATH": "1", **_FRUGAL, VARIABLE: ""}
        self._process = subprocess.Popen(
            [sys.executable, "-m", __name__, *modules],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )
        atexit.register(self.close)

    def launch(self, launch: Launch) -> "ForkedWorkers":
        return ForkedWorkers(self, launch.num_workers, launch.environment)

    def close(self) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait()
        self._process.stdout.close()
        atexit.unregister(self.close)

    def ask(self, *request: Any) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        return json.loads(self._process.stdout.readline())


class ForkedWorkers:
    """A launcher: see `tinsmith_workers.Launcher`."""

    def __init__(self, nursery: Nursery, num_workers: int, environment: Mapping[str, str]) -> None:
        self.num_workers: int | None = num_workers
        self._nursery = nursery
        self._pids = nursery.ask("start", num_workers, dict(environment))

    def ended(self) -> str | None:
        ended = self._nursery.ask("ended", self._pids)
        return f"forked workers left with {ended}" if ended else None

    def close(self) -> None:
        self._nursery.ask("end", self._pids)


# The process that forks ----------------------------------------------------------------------------------------------


def main(modules: list[str]) -> None:
    gc.disable()
    for module in ("tinsmith_workers.serving", *modules):
        import_module(module)
    gc.collect()
    gc.freeze()
    gc.enable()
    children: set[int] = set()
    for line in sys.stdin:
        what, *arguments = json.loads(line)
        print(json.dumps(_ANSWERS[what](children, *arguments)), flush=True)  # noqa: T201 - the answer
    for pid in children:
        os.kill(pid, signal.SIGKILL)
    os._exit(0)


def _start(children: set[int], num_workers: int, environment: Mapping[str, str]) -> list[int]:
    shared = {**environment, NUM_WORKERS: str(num_workers)}
    pids = [_fork({**shared, INDEX: str(index)}) for index in range(num_workers)]
    children |= set(pids)
    return pids


def _fork(environment: Mapping[str, str]) -> int:
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        os.setsid()
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(2, 1)  # standard output is for answers
        _be_worker(environment)
        code = 0
    except SystemExit as leaving:
        if isinstance(leaving.code, str):
            print(leaving.code, file=sys.stderr, flush=True)  # noqa: T201 - as the interpreter does
        code = leaving.code if isinstance(leaving.code, int) else 1
    except BaseException:  # noqa: BLE001 - the process ends with it
        traceback.print_exc()
    finally:
        os._exit(code)


def _be_worker(environment: Mapping[str, str]) -> None:
    from tinsmith import failpoints
    from tinsmith_workers.serving import main as be_worker

    os.environ.update(environment)
    failpoints.arm(environment.get(VARIABLE, ""))
    be_worker()


def _ended(children: set[int], pids: list[int]) -> list[int]:
    """Return the wait statuses of those that have ended."""
    found = [os.waitpid(pid, os.WNOHANG) for pid in pids if pid in children]
    children -= {pid for pid, _ in found}
    return [status for pid, status in found if pid]


def _end(children: set[int], pids: list[int]) -> None:
    """Wait for the workers, whose connections are closed. Kill what is left."""
    deadline = time.monotonic() + _STOP_S
    while children & set(pids) and time.monotonic() < deadline:
        _ended(children, pids)
        time.sleep(0.01)
    for pid in children & set(pids):
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        children.discard(pid)


_ANSWERS: Final[Mapping[str, Callable[..., Any]]] = {"start": _start, "ended": _ended, "end": _end}


if __name__ == "__main__":
    main(sys.argv[1:])
