"""What a terminal hands down to tests, set right before they begin; and what they leave behind, found when they end.

A run may be started by `nohup`, by `&` in a script, behind a proxy, with a long TMPDIR. Tests of how the product stands
that set it up themselves, for processes that they start.
"""

import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Final
from uuid import uuid4

import psutil
import pytest

_SIGNALS: Final = {
    signal.SIGINT: signal.default_int_handler,
    signal.SIGTERM: signal.SIG_DFL,
    signal.SIGCHLD: signal.SIG_DFL,
    signal.SIGPIPE: signal.SIG_IGN,  # as Python has it
}
_UNSET: Final = {
    "COLUMNS", "LINES", "FORCE_COLOR", "NO_COLOR", "MAKEFLAGS", "PYTHONSTARTUP", "PYTHONWARNINGS", "PYTHONUTF8",
    "PYTHONIOENCODING", "PYTHONCOERCECLOCALE", "PYTHONINSPECT", "PYTHONSAFEPATH", "TINKER_BASE_URL", "TINKER_API_KEY",
    "TINSMITH_CONFIG", "TINSMITH_WORKER_KEY",
}  # fmt: skip
_MARK: Final = "OF_TEST_PROCESS"
"""In the environment of every process that a test starts, whoever its parent is by now."""
_PATIENCE_S: Final = float(os.environ.get("ORPHANS_PATIENCE_S", "60"))
_MOST_BYTES: Final = 60  # of the path of temporary files: PostgreSQL, Ray, Chromium and others keep sockets there
_END_WITH_US: Final = ("multiprocessing.resource_tracker", "multiprocessing.forkserver", "testing.forked_workers")
"""Helpers of this process, in their commands: they end when it does."""
_mark = uuid4().hex
_before: Final[dict[Path, set[str]]] = {}


def settle() -> None:
    """Set right what was handed down. What processes inherit from this one is then the same everywhere."""
    _settle_signals()
    os.umask(0o022)
    for name in list(os.environ):
        is_setting = name.startswith("TINSMITH_") and "__" in name
        if name in _UNSET or name.lower().endswith("_proxy") or is_setting:
            del os.environ[name]
    os.environ[_MARK] = _mark
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", tempfile.gettempdir())  # where `tmp_path` is
    os.environ["TMPDIR"] = tempfile.tempdir = str(_temporary)


def _settle_signals() -> None:
    for number, handler in _SIGNALS.items():
        signal.signal(number, handler)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())


def _own_temporary_directory(parent: Path) -> Path:
    """Make a directory of this process; if its path is too long, return a short link to it."""
    made = Path(tempfile.mkdtemp(prefix="tests-", dir=parent))
    made.chmod(0o755)  # PostgreSQL runs as another user
    if len(os.fsencode(made)) <= _MOST_BYTES:
        return made
    link = Path("/tmp") / f"tests-{_mark[:12]}"
    link.symlink_to(made)
    return link


_temporary: Final = _own_temporary_directory(Path(tempfile.gettempdir()))


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    settle()
    _before[config.rootpath] = set(_visible(config.rootpath))


def pytest_unconfigure() -> None:
    shutil.rmtree(_temporary.resolve(), ignore_errors=True)
    if _temporary.is_symlink():
        _temporary.unlink()


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> Iterator[None]:
    """At the end of each file, find orphans; at the end of all, find whatever is left of its tests."""
    yield
    if nextitem is None or nextitem.path != item.path:
        _settle_signals()  # commands that tests run in this process install handlers
        faults = [*_orphans()]
        if nextitem is None:
            faults += [*_left_processes(), *_listeners(), *_left_files(item.config.rootpath)]
        if faults:
            pytest.fail(f"the tests of {item.path.name} have left behind:\n" + "\n".join(faults), pytrace=False)


def _orphans() -> Iterator[str]:
    """Processes whose parent has ended before them. They get time to end: some find out by themselves."""
    marked = _marked()
    parents = {os.getpid(), *(each.pid for each in marked)}
    orphans = [each for each in marked if _parent(each) not in parents]
    yield from _killed(psutil.wait_procs(orphans, _PATIENCE_S)[1], "whose parent has ended")


def _left_processes() -> Iterator[str]:
    left = [each for each in _marked() if not any(helper in _command(each) for helper in _END_WITH_US)]
    yield from _killed(psutil.wait_procs(left, _PATIENCE_S)[1], "at the end")


def _marked() -> list[psutil.Process]:
    """Return the processes that tests of this process have started, and that run."""
    found = []
    for each in psutil.process_iter():
        with suppress(psutil.Error, OSError):
            if each.pid != os.getpid() and each.status() != psutil.STATUS_ZOMBIE and _mark == each.environ().get(_MARK):
                found.append(each)
    return found


def _parent(process: psutil.Process) -> int | None:
    with suppress(psutil.Error):
        return process.ppid()
    return None


def _command(process: psutil.Process) -> str:
    with suppress(psutil.Error):
        return " ".join(process.cmdline())
    return ""


def _killed(processes: list[psutil.Process], what: str) -> Iterator[str]:
    for each in processes:
        told = f"process {each.pid} {what}: {_command(each)}"
        with suppress(psutil.Error):
            each.kill()
            yield told


def _listeners() -> Iterator[str]:
    """Not in a process that has used torch.distributed: gloo listens as long as compiled code names a mesh."""
    if "torch.distributed" in sys.modules:
        return
    for each in psutil.Process().net_connections("inet"):
        if each.status == psutil.CONN_LISTEN:
            yield f"a listener of this process at {each.laddr.ip}:{each.laddr.port}"


def _left_files(directory: Path) -> Iterator[str]:
    """Files in the current directory; hidden ones are caches. Temporary files go with their directory."""
    yield from (f"the file {name}" for name in set(_visible(directory)) - _before.get(directory, set()))


def _visible(directory: Path) -> Iterator[str]:
    return (each.name for each in directory.iterdir() if not each.name.startswith("."))
