"""A server and its client, both processes of their own, and how they are told what to do."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any, Final, Self

from comparison.proc import tree_cpu_s

_BENCHMARKS: Final = Path(__file__).parents[1]
_SETTLED_CORES: Final = 0.15
_SETTLE_POLL_S: Final = 1.5
_QUIET_POLLS: Final = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """What every server of a comparison is started with."""

    model: Path
    vocab_size: int
    work_dir: Path
    max_models: int
    rank: int
    sdk: Path | None  # a directory with another Tinker SDK than that of this environment

    def beside(self, name: str) -> "Setup":
        """Return the same setup in a directory of its own, for a second server of one script."""
        return replace(self, work_dir=self.work_dir / name)


@dataclass(slots=True)
class Server:
    """A server that is ready, with a client that waits for commands."""

    name: str
    version: str
    url: str
    base_model: str
    configuration: dict[str, str]
    pid: int | None
    client: subprocess.Popen[str]
    cache_was_warm: bool
    ready_s: float
    sdk: str = ""
    peak_mib: float = 0.0

    @classmethod
    @contextmanager
    def started(cls, script: Sequence[str], setup: Setup) -> Iterator[Self]:
        """Run `comparison.start_SCRIPT`, and a client beside it, until the block ends."""
        work_dir = setup.work_dir / script[0]
        cache_was_warm = work_dir.is_dir()
        work_dir.mkdir(parents=True, exist_ok=True)
        started = time.monotonic()
        with _process(_server_command(script, setup, work_dir)) as process:
            told = json.loads(_line_of(process))
            ready_s = time.monotonic() - started
            with _process(_client_command(told, setup), sdk=setup.sdk) as client:
                yield cls(
                    name=told["name"],
                    version=told["version"],
                    url=told["url"],
                    base_model=told["base_model"],
                    configuration=told["configuration"],
                    pid=told["pid"],
                    client=client,
                    cache_was_warm=cache_was_warm,
                    ready_s=ready_s,
                )

    def ask(self, command: str, scenario: str) -> dict[str, Any]:
        """Have the client prepare or measure a scenario. Its answer has the key `error` if the server failed."""
        assert self.client.stdin is not None
        print(command, scenario, file=self.client.stdin, flush=True)
        answer: dict[str, Any] = json.loads(_line_of(self.client))
        return answer

    def cpu_s(self) -> float:
        return tree_cpu_s(self.pid) if self.pid else 0.0

    def settle(self, timeout_s: float) -> float:
        """Wait until the server does almost nothing, because it has compiled everything. Return the seconds."""
        started, quiet = time.monotonic(), 0
        while quiet < _QUIET_POLLS and time.monotonic() - started < timeout_s:
            before = self.cpu_s()
            time.sleep(_SETTLE_POLL_S)
            quiet = quiet + 1 if self.cpu_s() - before < _SETTLED_CORES * _SETTLE_POLL_S else 0
        return time.monotonic() - started


def _server_command(script: Sequence[str], setup: Setup, work_dir: Path) -> list[str]:
    name, *options = script
    command = [sys.executable, "-m", f"comparison.start_{name}", "--model", str(setup.model)]
    command += ["--work-dir", str(work_dir), "--max-models", str(setup.max_models), "--rank", str(setup.rank)]
    return [*command, *options]


def _client_command(told: dict[str, Any], setup: Setup) -> list[str]:
    command = [sys.executable, "-m", "comparison.client", "--url", told["url"], "--base-model", told["base_model"]]
    command += ["--vocab-size", str(setup.vocab_size), "--rank", str(setup.rank)]
    return command + (["--pid", str(told["pid"])] if told["pid"] else [])


@contextmanager
def _process(command: Sequence[str], *, sdk: Path | None = None) -> Iterator[subprocess.Popen[str]]:
    """Run it with pipes in its own directory of modules. It ends when its input does."""
    paths = [str(path) for path in (sdk, _BENCHMARKS) if path is not None]
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environ, start_new_session=True
    ) as process:
        try:
            yield process
        finally:
            _close(process.stdin)
            process.wait()


def _close(pipe: IO[str] | None) -> None:
    assert pipe is not None
    pipe.close()


def _line_of(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line:
        msg = f"{process.args!r} ended with exit code {process.wait()}"
        raise RuntimeError(msg)
    return line
