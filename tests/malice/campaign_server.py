"""`tinsmith serve` as a campaign attacks it: a process with limited memory, watched and accounted for."""

import json
import os
import resource
import shutil
import signal
import sqlite3
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil

NEIGHBOUR, ATTACKER, THIRD = "tml-neighbour", "tml-attacker", "tml-third"
BASE_MODEL = "toy"
MEMORY_BYTES = 6 << 30  # of address space, for each process: an attack that works must not take the machine down
START_S = 300.0
_OPTIONS = {"plugin": "toy"}


def api_keys() -> list[dict[str, str]]:
    return [{"key": key, "tenant": key.removeprefix("tml-")} for key in (NEIGHBOUR, ATTACKER, THIRD)]


class CampaignServer:
    """Serves the toy to three tenants on a port that the system chooses, or with `model` what that says.

    `MALICE_PYTHON` names the Python of another checkout, to see how that one fares.
    """

    def __init__(
        self, directory: Path, *, server: Mapping[str, Any], backend: Mapping[str, Any], model: Mapping[str, Any]
    ) -> None:
        self.data_dir = directory / "data"
        served = {"name": BASE_MODEL, **model, "backend": {**_OPTIONS, **backend}}
        content = {
            "server": {"data_dir": str(self.data_dir), "port": 0, "api_keys": api_keys(), **server},
            "models": [served],
        }
        settings_file = directory / "settings.yaml"
        settings_file.write_text(json.dumps(content))
        self.log = directory / "log"
        python = os.environ.get("MALICE_PYTHON", sys.executable)
        environ = {name: value for name, value in os.environ.items() if not name.startswith("TINSMITH_")}
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                [python, "-m", "tinsmith", "serve", "--config", str(settings_file)],
                env={**environ, "OMP_NUM_THREADS": "1"},
                stderr=log,
                start_new_session=True,
            )
        if served["backend"]["plugin"] == "toy":  # frameworks reserve more address space than there is memory
            limits = (MEMORY_BYTES, MEMORY_BYTES)
            resource.prlimit(self.process.pid, resource.RLIMIT_AS, limits)  # engines inherit it
        self.url = self._wait_until_ready()
        self.born = self.processes()

    def _wait_until_ready(self) -> str:
        deadline = time.monotonic() + START_S
        while time.monotonic() < deadline and self.process.poll() is None:
            try:
                url = str(json.loads((self.data_dir / "server.lock").read_text())["url"])
                with urllib.request.urlopen(f"{url}/readyz", timeout=5):
                    return url
            except (OSError, ValueError, KeyError, urllib.error.URLError):
                time.sleep(0.1)  # a process starts, and nothing tells when
        raise AssertionError(self.log.read_text()[-4000:])

    def processes(self) -> dict[int, str]:
        """Return the pids of the server and its engines, with their roles."""
        children = psutil.Process(self.process.pid).children(recursive=True)
        return {self.process.pid: "server", **{child.pid: "engine" for child in children}}

    @property
    def database(self) -> Path:
        return self.data_dir / "tinsmith.db"

    def database_bytes(self) -> int:
        return sum(file.stat().st_size for file in self.data_dir.glob("tinsmith.db*"))

    def recorded(self, request_ids: Sequence[str]) -> int:
        """Count which of these the log holds."""
        with sqlite3.connect(f"file:{self.database}?mode=ro", uri=True) as connection:
            every = {row[0] for row in connection.execute("SELECT request_id FROM operations")}
        connection.close()
        return len(every & set(request_ids))

    def close(self) -> None:
        if self.process.poll() is None:
            for pid in self.processes():
                os.kill(pid, signal.SIGKILL)
        self.process.wait(START_S)
        shutil.rmtree(self.data_dir / "checkpoints", ignore_errors=True)


@contextmanager
def campaign_server(
    directory: Path,
    *,
    server: Mapping[str, Any] | None = None,
    backend: Mapping[str, Any] | None = None,
    model: Mapping[str, Any] | None = None,
) -> Iterator[CampaignServer]:
    served = CampaignServer(directory, server=server or {}, backend=backend or {}, model=model or {})
    try:
        yield served
    finally:
        served.close()


class MemoryWatch:
    """How far the resident memory of each process rises above what it is now. The kernel keeps the high-water mark."""

    def __init__(self, pids: Mapping[int, str]) -> None:
        self._pids = dict(pids)
        for pid in pids:
            Path(f"/proc/{pid}/clear_refs").write_text("5")
        self._before = {pid: _high_water(pid) for pid in pids}

    def growth(self) -> dict[str, int]:
        """Return bytes by role. A process that has died is left out."""
        found = {pid: _high_water(pid) for pid in self._pids}
        return {role: found[pid] - self._before[pid] for pid, role in self._pids.items() if found[pid]}


def _high_water(pid: int) -> int:
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return 0
    line = next((line for line in status.splitlines() if line.startswith("VmHWM:")), None)
    return 0 if line is None else int(line.split()[1]) << 10
