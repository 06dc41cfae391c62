"""Commands in processes that the launcher forks: the same as started ones, without the second that imports take."""

import contextlib
import os
import signal
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Protocol, Self

from processes import DIRECTORY, Launcher

LIMIT_S = 600


class File(Protocol):
    def fileno(self) -> int: ...


class Forked:
    """Like subprocess.Popen. Without `output` and `errors`, what it prints goes where the tests' own output goes."""

    def __init__(
        self,
        launcher: Launcher,
        *arguments: str,
        environ: Mapping[str, str],
        cwd: Path | None = None,
        output: File | None = None,
        errors: File | None = None,
    ) -> None:
        """`arguments` are those of `tinsmith`, or `-m MODULE ...` or `-c CODE ...` as for Python."""
        where = {DIRECTORY: str(cwd or Path.cwd())}
        files = [1 if output is None else output.fileno(), 2 if errors is None else errors.fileno()]
        self._connection = launcher.ask([*arguments], {**environ, **where}, *files)
        self.pid = int(self._connection.recv(64))
        self.returncode: int | None = None

    def wait(self, timeout: float = LIMIT_S) -> int:
        if self.returncode is None:
            self._connection.settimeout(timeout)
            try:
                self.returncode = os.waitstatus_to_exitcode(int(self._connection.recv(64)))
            except TimeoutError:
                raise subprocess.TimeoutExpired(str(self.pid), timeout) from None
            self._connection.close()
        return self.returncode

    def poll(self) -> int | None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self.wait(0.001)
        return None

    def send_signal(self, number: signal.Signals) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.wait()


def run(
    launcher: Launcher, *arguments: str, environ: Mapping[str, str], cwd: Path | None = None
) -> "subprocess.CompletedProcess[str]":
    """Like subprocess.run, with the output."""
    with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as errors:
        forked = Forked(launcher, *arguments, environ=environ, cwd=cwd, output=output, errors=errors)
        code = forked.wait()
        for file in (output, errors):
            file.seek(0)
        return subprocess.CompletedProcess(arguments, code, output.read().decode(), errors.read().decode())
