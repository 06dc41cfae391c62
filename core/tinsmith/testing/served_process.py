"""`tinsmith serve` in a process of its own, for tests of what threads do not show."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from tinsmith.lifeline import Tethered
from tinsmith.loopback import exempt_loopback
from tinsmith.processes.data_dir_lock import read_server_url
from tinsmith.settings import DataDir
from tinsmith.settings.sources import ENV_PREFIX

_STOP_S = 300.0


@dataclass(frozen=True, slots=True)
class ServedProcess:
    process: "subprocess.Popen[bytes]"
    url: str
    data_dir: Path
    log: Path


@contextmanager
def served_process(directory: Path, settings: Mapping[str, Any]) -> Iterator[ServedProcess]:
    """Serve with these settings, at a free port, until the block ends. All files are in `directory`.

    Requests wait until an engine has loaded.
    """
    config, data_dir, log = directory / "tinsmith.yaml", directory / "data", directory / "log"
    exempt_loopback(os.environ)  # for clients in this process
    served = yaml.safe_dump({**settings, "server": {"port": 0, "data_dir": str(data_dir)}})
    config.write_text(served, encoding="utf-8")
    command = [sys.executable, "-m", "tinsmith", "serve", "--config", str(config)]
    with log.open("wb") as output, Tethered(command, stderr=output, env=without_settings()) as process:
        try:
            yield ServedProcess(process, wait_for_url(process, data_dir), data_dir, log)
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(_STOP_S)


def without_settings() -> dict[str, str]:
    """Return this process's environment without settings of tinsmith."""
    return {name: value for name, value in os.environ.items() if not name.startswith(ENV_PREFIX)}


def wait_for_url(server: "subprocess.Popen[bytes]", data_dir: Path) -> str:
    """Return where the server answers, once it has written that. Fail if it ends before."""
    while server.poll() is None:
        if (url := read_server_url(DataDir.at(data_dir), pid=server.pid)) is not None:
            return url
        with suppress(subprocess.TimeoutExpired):
            server.wait(0.1)
    raise AssertionError(f"the server ended with {server.returncode}")
