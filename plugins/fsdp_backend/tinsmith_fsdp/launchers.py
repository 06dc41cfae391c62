"""Launchers: start the processes of the ranks."""

import os
import secrets
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Final, Protocol

from tinsmith_fsdp.config import FsdpConfig

_STOP_S: Final = 5.0


class Launcher(Protocol):
    """A launcher that has started the ranks."""

    def ended(self) -> str | None:
        """Return how it ended, or None while it runs."""

    def close(self) -> None:
        """End any remaining processes. The ranks have ended or will end at once, as their connections are closed."""


class ElasticLauncher:
    """torch.distributed's elastic agent in a separate process, which ends when this one does."""

    def __init__(self, config: FsdpConfig, environment: Mapping[str, str], directory: Path) -> None:
        command = [sys.executable, "-m", "tinsmith_fsdp.launch", "--with-parent"]
        command += ["--nnodes", str(config.nnodes), "--nproc-per-node", str(config.nproc_per_node or 0)]
        command += ["--rdzv-endpoint", config.rdzv_endpoint, "--logs", str(directory)]
        if config.nnodes == 1:
            command += ["--rdzv-id", secrets.token_hex(8)]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, env={**os.environ, **environment}, start_new_session=True
        )

    def ended(self) -> str | None:
        code = self._process.poll()
        return None if code is None else f"the launcher left with {code}"

    def close(self) -> None:
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):
            self._process.stdin.close()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(_STOP_S)
        self._process.kill()
        self._process.wait()


def start(config: FsdpConfig, environment: Mapping[str, str], directory: Path) -> Launcher:
    """Start the ranks with these environment variables. `directory` is for the launcher's own files."""
    if config.launcher == "ray":
        from tinsmith_fsdp.ray_launcher import RayLauncher

        launcher: Launcher = RayLauncher(config, environment)
        return launcher
    return ElasticLauncher(config, environment, directory)
