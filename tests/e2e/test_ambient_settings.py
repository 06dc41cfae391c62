"""What a user's shell may hold, all at once: a dead proxy, long paths with spaces, masks, signals, a locale.

Real programs run in it.
"""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from tinsmith.lifeline import Tethered
from tinsmith.testing.ports import hold_port
from tinsmith.testing.served_process import wait_for_url, without_settings

# What hands settings down forks, and a test before may have imported JAX, which warns of that: nothing of it is used.
pytestmark = pytest.mark.filterwarnings("ignore:os.fork:RuntimeWarning")

LIMIT_S = 600
NAME = "L\u00e4ufe \u8d70\u308b"  # ASCII cannot show it


@dataclass(frozen=True)
class Shell:
    """The shell, and the server that was started in it."""

    home: Path
    variables: Mapping[str, str]
    url: str
    data_dir: Path
    server_log: Path

    def run(self, *command: str) -> str:
        """Return stdout."""
        return run(self.home, {**self.variables, "TINKER_BASE_URL": self.url}, command)


def run(home: Path, variables: Mapping[str, str], command: Sequence[str]) -> str:
    done = subprocess.run(
        [sys.executable, "-m", *command],
        cwd=home,
        env=variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=LIMIT_S,
        check=False,
        preexec_fn=hand_down,
    )
    output = done.stdout.decode()
    assert done.returncode == 0, output
    return output


def hand_down() -> None:
    """As `nohup`, `&` in a script and careless service managers do."""
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGCHLD):
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    os.umask(0)


def variables_of(home: Path, proxy: str) -> dict[str, str]:
    temporary, startup = home / "temporary files" / ("t" * 150), home / "startup.py"
    temporary.mkdir(parents=True)
    startup.write_text("raise SystemExit('PYTHONSTARTUP ran')", encoding="utf-8")
    names = [f"{each}_proxy" for each in ("http", "https", "all")]
    return {
        **{name: value for name, value in without_settings().items() if name != "HOME"},
        **{name: proxy for each in names for name in (each, each.upper())},
        "NO_PROXY": "intranet.example",
        "TMPDIR": str(temporary),
        "LC_ALL": "C",
        "PYTHONUTF8": "0",
        "PYTHONCOERCECLOCALE": "0",
        "PYTHONSTARTUP": str(startup),
        "PYTHONWARNINGS": "error",
        "TZ": "Pacific/Kiritimati",
        "COLUMNS": "20",
        "MAKEFLAGS": "-k -j9",
        "PIP_REQUIRE_VIRTUALENV": "1",
        "TINKER_API_KEY": "tml-local",
    }


@pytest.fixture(scope="module")
def shell(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shell]:
    home = tmp_path_factory.mktemp("a user's home")
    data_dir, log = home / "data of a run" / ("d" * 100), home / "log"
    data_dir.parent.mkdir()
    command = [sys.executable, "-m", "tinsmith", "serve", "--backend", "toy", "--base-model", "toy", "--port", "0"]
    command += ["--data-dir", str(data_dir)]
    with hold_port() as nobody:  # listens there
        variables = variables_of(home, f"http://127.0.0.1:{nobody.getsockname()[1]}")
        with (
            log.open("wb") as output,
            Tethered(command, env=variables, cwd=home, stderr=output, preexec_fn=hand_down) as process,
        ):
            url = wait_for_url(process, data_dir)
            begin_a_run(url)
            yield Shell(home, variables, url, data_dir, log)
            process.send_signal(signal.SIGINT)  # stays ignored, and is not taken for the first of two signals
            process.send_signal(signal.SIGTERM)
            assert process.wait(LIMIT_S) == 0, log.read_text(encoding="utf-8")


def begin_a_run(url: str) -> None:
    with httpx.Client(base_url=f"{url}/api/v1/", headers={"X-API-Key": "tml-local"}, timeout=LIMIT_S) as http:
        session = http.post("create_session", json={"user_metadata": {"name": NAME}}).json()["session_id"]
        model = {"session_id": session, "model_seq_id": 0, "base_model": "toy", "lora_config": {"rank": 2}}
        created = http.post("create_model", json={**model, "user_metadata": {"name": NAME}}).json()
        answer = http.post("retrieve_future", json={"request_id": created["request_id"]}).json()
        assert answer["model_id"] == f"{session}:train:0"


def test_commands_reach_the_server_and_say_what_a_terminal_can_show(shell: Shell) -> None:
    shown = shell.run("tinsmith", "top")
    assert "toy ready" in shown
    assert ":train:0, 0 steps" in shown
    listed = json.loads(shell.run("tinsmith", "runs", "show", "last", "--json"))
    assert listed["run"]["user_metadata"] == {"name": NAME}


def test_others_write_and_read_nothing_of_a_server(shell: Shell) -> None:
    modes = {each.relative_to(shell.data_dir): each.stat().st_mode & 0o777 for each in shell.data_dir.rglob("*")}
    assert {str(each) for each, mode in modes.items() if mode & 0o002 and each.suffix != ".sock"} == set()
    private = {"tinsmith.db", "server.lock", "engines", "tinsmith.db.wake", "engines/toy.json"}
    assert {name: modes[Path(name)] & 0o077 for name in private} == dict.fromkeys(private, 0)
    assert shell.data_dir.stat().st_mode & 0o077 == 0


def test_trackers_read_the_server(shell: Shell) -> None:
    directory, state = shell.home / "boards", shell.home / "state"
    told = shell.run(
        "tinsmith_trackers.command", "tensorboard", "--once", "--dir", str(directory), "--state", str(state)
    )
    assert f"copying from {shell.url} to tensorboard" in told


@pytest.mark.thorough
def test_the_demo_learns(tmp_path_factory: pytest.TempPathFactory) -> None:
    home = tmp_path_factory.mktemp("a user's home")
    with hold_port() as nobody:
        variables = variables_of(home, f"http://127.0.0.1:{nobody.getsockname()[1]}")
        variables["PYTHONWARNINGS"] = "default"  # the example's libraries warn
        shown = run(home, variables, ("tinsmith", "demo", "--directory", str(home / "of the demo" / ("d" * 100))))
    assert "3 of 3 right" in shown
