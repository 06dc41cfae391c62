"""The launcher ray: a cluster that asks for a token, and the refusal of others. Runs where Ray is installed."""

import os
import secrets
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from textwrap import dedent

import psutil
import pytest

from tinsmith import ConfigError
from tinsmith_workers import WorkerGroup, WorkersConfig
from tinsmith_workers.testing import WorkersContract
from tinsmith_workers.testing.contract import PROGRAM, no_progress

pytestmark = [
    pytest.mark.skipif(find_spec("ray") is None, reason="Ray is not installed"),
    pytest.mark.slow,
    pytest.mark.thorough,
    pytest.mark.timeout(900),
]

START_S = 300
TOKEN = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}


@contextmanager
def cluster(authentication: Mapping[str, str]) -> Iterator[str]:
    """Start Ray on this machine, as its documentation says. Yields the address."""
    with TemporaryDirectory(prefix="ray-") as directory:
        command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--port", "0", "--num-cpus", "8"]
        command += ["--include-dashboard", "false", "--node-ip-address", "127.0.0.1", "--temp-dir", directory]
        environment = {**os.environ, "RAY_AUTH_MODE": "disabled", **authentication}
        subprocess.run(command, check=True, env=environment, timeout=START_S, stdout=subprocess.DEVNULL)
        try:
            yield (Path(directory) / "ray_current_cluster").read_text().strip()
        finally:
            _kill_all(directory)


def _kill_all(directory: str) -> None:
    """Kill whatever has the cluster's directory in its command, and its children, which have other names."""
    for process in psutil.process_iter(["cmdline"]):
        if directory in " ".join(process.info["cmdline"] or []):
            with suppress(psutil.NoSuchProcess):
                for each in [process, *process.children(recursive=True)]:
                    each.kill()


class TestRay(WorkersContract):
    @pytest.fixture(scope="class")
    @classmethod
    def workers_config(cls) -> Iterator[WorkersConfig]:  # type: ignore[override]
        with pytest.MonkeyPatch.context() as patch, cluster(TOKEN) as address:
            for name, value in TOKEN.items():
                patch.setenv(name, value)
            yield WorkersConfig(launcher="ray", ray_address=address, nproc_per_node=2, start_timeout_s=START_S)
            import ray  # not before: it reads its variables when it is imported

            ray.shutdown()


def outcome(address: str, authentication: Mapping[str, str], directory: Path) -> str:
    """Start two workers in a process of its own, in a directory. Returns what it printed last."""
    code = f"""
        from tinsmith_workers.testing.contract import Program, no_progress
        from tinsmith_workers import WorkerGroup, WorkersConfig
        config = WorkersConfig(launcher="ray", ray_address={address!r}, nproc_per_node=2, start_timeout_s={START_S})
        try:
            group = WorkerGroup({PROGRAM!r}, config, no_progress)
            print([place["rank"] for place in group.call(Program.place)])
            group.close()
        except Exception as error:
            print(f"{{type(error).__name__}}: {{error}}")
    """
    environment = {**os.environ, "RAY_AUTH_MODE": "disabled", **authentication}
    command = [sys.executable, "-P", "-c", dedent(code)]
    done = subprocess.run(command, env=environment, cwd=directory, capture_output=True, text=True, check=False)
    assert done.stdout, done.stderr
    return done.stdout.splitlines()[-1]


def test_a_cluster_that_asks_for_no_token_is_refused(tmp_path: Path) -> None:
    with cluster({}) as address:
        assert "the Ray cluster asks for no token" in outcome(address, {}, tmp_path)
        assert "have the same RAY_AUTH_MODE" in outcome(address, TOKEN, tmp_path)


def test_another_token_does_not_join_and_the_right_one_imports_nothing_from_the_current_directory(
    tmp_path: Path,
) -> None:
    (tmp_path / "tinsmith.py").write_text("raise ImportError('a module of the current directory was imported')")
    with cluster(TOKEN) as address:
        assert "RAY_AUTH_TOKEN is not its token" in outcome(address, {**TOKEN, "RAY_AUTH_TOKEN": "x" * 64}, tmp_path)
        assert outcome(address, TOKEN, tmp_path) == "[0, 1]"


def test_no_cluster_is_started_for_want_of_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would listen on all interfaces."""
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    with pytest.raises(ConfigError, match="neither ray_address nor RAY_ADDRESS names a cluster"):
        WorkerGroup(PROGRAM, WorkersConfig(launcher="ray", nproc_per_node=2), no_progress)
