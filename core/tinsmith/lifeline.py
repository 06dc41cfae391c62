"""Processes that end with the one that has started them, whatever either is doing, and all that they start themselves.

Every program is started as `Tethered`. When the process that holds it dies, even by SIGKILL, the kernel sends SIGTERM
to the program's process group (on Linux; elsewhere, programs of our own call `end_with`). Whatever ignores SIGTERM
does so to clean up after others, and gets a moment for it.
"""

from __future__ import annotations

import errno
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Final, NoReturn

from tinsmith import scratch, tether
from tinsmith.tether import has_ended, tie

PATIENCE_S: Final = 2.0
_POLL_S: Final = 0.01

_lock = threading.Lock()
_running: weakref.WeakSet[Tethered] = weakref.WeakSet()  # guarded by the lock, like the fields below
_leaving = False


class Tethered(subprocess.Popen[bytes]):
    """A program in a process group of its own, which ends with this process, with a `with` block, or by `end`.

    Its standard input is the tether: it never gets anything there.
    """

    def __init__(
        self,
        command: Sequence[str | Path],
        *,
        env: Mapping[str, str],
        **options: Any,
    ) -> None:
        """Raise OSError if there is no such program."""
        program = [str(part) for part in command]
        if shutil.which(program[0], path=env.get("PATH")) is None:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), program[0])
        reader, writer = os.pipe()
        self._untie = weakref.finalize(self, os.close, writer)
        tied = [sys.executable, "-I", "-S", tether.__file__, *program]
        with _lock:
            try:
                if _leaving:
                    raise ProcessLookupError(errno.ESRCH, "this process is about to end")
                super().__init__(tied, stdin=reader, start_new_session=True, env=env, **options)
                _running.add(self)
            finally:
                os.close(reader)

    def end(self) -> None:
        """Kill the program, end what it has started, and wait."""
        self.kill()
        self.wait()
        end_group(self.pid)
        self._untie()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.end()
        super().__exit__(kind, error, at)


def run_tethered(
    command: Sequence[str | Path], *, env: Mapping[str, str], timeout_s: float | None = None, **options: Any
) -> subprocess.CompletedProcess[bytes]:
    """Run a program to its end, and return its output. Raise OSError if there is none, TimeoutExpired."""
    with Tethered(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, **options) as program:
        output, errors = program.communicate(timeout=timeout_s)
        return subprocess.CompletedProcess(program.args, program.returncode, output, errors)


def end_group(group: int) -> None:
    """End what is left of a process group whose leader has ended; kill what does not do so in time."""
    deadline = time.monotonic() + PATIENCE_S
    with suppress(ProcessLookupError, PermissionError):  # nothing is left, or only what has ended
        os.killpg(group, signal.SIGTERM)
        while _lives(group):
            if time.monotonic() > deadline:
                os.killpg(group, signal.SIGKILL)
                return
            time.sleep(_POLL_S)


def _lives(group: int) -> bool:
    """Return whether a process of the group runs. Raise ProcessLookupError if there is not even one to be reaped."""
    os.killpg(group, 0)
    if not Path("/proc/self/stat").exists():
        return True
    for process in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # it has just been reaped
            state, _, its_group = process.read_text(errors="replace", encoding="utf-8").rpartition(")")[2].split()[:3]
            if int(its_group) == group and state not in "ZX":
                return True
    return False


def leave(code: int) -> NoReturn:
    """End this process at once, without waiting for its threads: first what it has started, then its scratch."""
    global _leaving
    with _lock:
        _leaving, programs = True, list(_running)
    for program in programs:
        program.end()
    scratch.remove_all()
    sys.stderr.flush()
    os._exit(code)


def end_with(pipe: int) -> None:
    """Kill this process when the other end of a pipe closes, and end its process group if it leads one.

    Nobody may write to the pipe. On Linux the kernel does so, even while native code holds the interpreter. Elsewhere a
    thread must get a turn.
    """
    if os.getpgrp() == os.getpid():
        tie(pipe, signal.SIGTERM, -os.getpgrp())
    tie(_opened_again(pipe), signal.SIGKILL, os.getpid())
    if has_ended(pipe, timeout_ms=0):  # before the kernel was asked
        os._exit(1)
    threading.Thread(target=_watch, args=(pipe,), name="lifeline", daemon=True).start()


def _opened_again(pipe: int) -> int:
    """Return another description of a pipe, to send a signal of its own. Without /proc it is the same one."""
    try:
        return os.open(f"/proc/self/fd/{pipe}", os.O_RDONLY | os.O_NONBLOCK)
    except OSError:
        return pipe


def _watch(pipe: int) -> None:
    while not has_ended(pipe):
        pass
    os._exit(1)
