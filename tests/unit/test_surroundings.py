"""Runs of tests in a bad terminal: what is handed down is set right, and what tests leave behind fails them."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import surroundings

# What hands settings down forks, and a test before may have imported JAX, which warns of that: nothing of it is used.
pytestmark = pytest.mark.filterwarnings("ignore:os.fork:RuntimeWarning")

SETTLED = """
import os, signal, subprocess, sys, tempfile

def test_all_is_set_right():
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert not signal.pthread_sigmask(signal.SIG_BLOCK, ())
    assert not {"HTTP_PROXY", "all_proxy", "COLUMNS", "TINKER_BASE_URL", "TINSMITH_SERVER__PORT"} & os.environ.keys()
    assert len(tempfile.gettempdir()) < 70
    with tempfile.NamedTemporaryFile() as made:
        assert "t" * 150 in os.path.realpath(made.name)
    assert os.umask(0o022) == 0o022

def test_a_process_can_be_interrupted():
    process = subprocess.Popen([sys.executable, "-c", "print(flush=True); input()"], stdin=-1, stdout=-1, stderr=-1)
    process.stdout.readline()
    process.send_signal(signal.SIGINT)
    assert b"KeyboardInterrupt" in process.communicate()[1]
"""
LEAVING = """
import socket, subprocess, sys

def test_one():
    code = "import subprocess; subprocess.Popen(['sleep', '1000'], start_new_session=True)"
    subprocess.run([sys.executable, "-c", code], check=True)

def test_two():
    global kept, listening
    kept = subprocess.Popen(["sleep", "2000"])
    listening = socket.create_server(("127.0.0.1", 0))
    open("left", "w").close()
"""


def run(directory: Path, content: str) -> str:
    file = directory / "test_it.py"
    file.write_text(content, encoding="utf-8")
    temporary = directory / ("t" * 150)
    temporary.mkdir()
    environment = {
        **os.environ,
        **dict.fromkeys(("HTTP_PROXY", "all_proxy", "TINKER_BASE_URL"), "http://127.0.0.1:9"),
        "COLUMNS": "20",
        "ORPHANS_PATIENCE_S": "0",
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
        "PYTHONPATH": str(Path(surroundings.__file__).parent),
        "TINSMITH_SERVER__PORT": "1",
        "TMPDIR": str(temporary),
    }
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "surroundings",
        "-p",
        "no:xdist",
        "-c",
        os.devnull,
        str(file),
    ]
    done = subprocess.run(
        command, env=environment, cwd=directory, capture_output=True, text=True, check=False, preexec_fn=hand_down
    )
    assert list(temporary.glob("tests-*")) == []
    return done.stdout


def hand_down() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
    os.umask(0)


def test_what_a_terminal_hands_down_is_set_right(tmp_path: Path) -> None:
    told = run(tmp_path, SETTLED)
    assert "2 passed" in told, told


def test_what_is_left_behind_fails_the_last_test(tmp_path: Path) -> None:
    told = run(tmp_path, LEAVING)
    assert "2 passed, 1 error" in told, told
    for each in ("whose parent has ended: sleep 1000", "at the end: sleep 2000", "a listener of this process at 127.0"):
        assert each in told
    assert "the file left" in told
