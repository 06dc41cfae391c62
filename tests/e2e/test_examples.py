"""The examples, as a person runs them, against a server with the installed backend and a tiny model."""

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tinsmith.testing.served_process import served_process, without_settings
from tinsmith_checkpoints.huggingface.tiny_model import TinyShape, write_tiny_model

EXAMPLES = Path(__file__).parents[2] / "examples"
LIMIT_S = 600

INTERRUPTED_START = """
import os, signal, sys
from pathlib import Path
from tinsmith.commands import demo

directory, start = Path(sys.argv[1]), demo._start

def interrupted(*args):
    server = start(*args)
    (directory / "pid").write_text(str(server.pid))
    os.kill(os.getpid(), signal.SIGINT)
    return server

demo._start = interrupted
sys.exit(demo.run_demo(directory))
"""

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module", params=["qwen3", "qwen3_moe"])
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, str]]:
    """A served tiny model: its URL and its name. Requests wait until it has loaded."""
    directory = tmp_path_factory.mktemp("examples")
    model = directory / "model"
    write_tiny_model(model, TinyShape(family=request.param, num_layers=2))
    with served_process(directory, {"models": [{"name": str(model), "path": str(model)}]}) as server:
        yield server.url, str(model)


@pytest.mark.thorough
@pytest.mark.parametrize("script", ["tutorial_pig_latin.py", "pig_latin.py", "rl_group.py"])
def test_example(server: tuple[str, str], script: str) -> None:
    url, name = server
    command = [sys.executable, "-W", "error::FutureWarning", str(EXAMPLES / script)]
    done = subprocess.run(
        [*command, "--base-url", url, "--base-model", name],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        env=without_settings(),
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def started(command: list[str]) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=without_settings()
    )


@pytest.mark.thorough  # the interrupted ones below start all that this one starts
def test_the_demo_learns_and_leaves_nothing(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tinsmith", "demo", "--directory", str(tmp_path / "demo")]
    demo = started(command)
    assert demo.stdout is not None
    family: set[psutil.Process] = set()
    lines = []
    for line in demo.stdout:
        lines.append(line)
        family.update(psutil.Process(demo.pid).children(recursive=True) if demo.poll() is None else [])
    demo.stdout.close()
    text = "".join(lines)
    assert demo.wait(LIMIT_S) == 0, text
    assert "3 of 3 right" in text
    assert len(family) >= 2, "the server and the script"
    assert not psutil.wait_procs(family, LIMIT_S)[1]


def test_an_interrupted_demo_leaves_nothing(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tinsmith", "demo", "--directory", str(tmp_path / "demo")]
    demo = started(command)
    assert demo.stdout is not None
    assert "wrote a random Qwen3" in demo.stdout.readline()
    while not (tmp_path / "demo" / "server.log").is_file() or not psutil.Process(demo.pid).children():
        with contextlib.suppress(subprocess.TimeoutExpired):
            demo.wait(0.1)
        assert demo.poll() is None
    family = psutil.Process(demo.pid).children(recursive=True)
    demo.send_signal(signal.SIGINT)
    rest = demo.stdout.read()
    demo.stdout.close()
    assert demo.wait(LIMIT_S) == 130, rest
    assert "interrupted; everything is stopped" in rest
    assert not psutil.wait_procs(family, LIMIT_S)[1]


def test_a_demo_interrupted_while_it_starts_its_server_stops_it(tmp_path: Path) -> None:
    """The signal comes when the process is forked and Popen has not returned yet."""
    script = tmp_path / "demo.py"
    script.write_text(INTERRUPTED_START)
    demo = subprocess.run(
        [sys.executable, str(script), str(tmp_path / "demo")],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert demo.returncode == 130, demo.stdout + demo.stderr
    pid = int((tmp_path / "demo" / "pid").read_text())
    try:
        assert not psutil.pid_exists(pid)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)
