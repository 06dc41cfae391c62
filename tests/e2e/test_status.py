"""`tinsmith status` and `top`: one look at a server, and a live one, on a narrow terminal and without one."""

import fcntl
import itertools
import json
import os
import pty
import re
import signal
import struct
import subprocess
import sys
import termios
from collections.abc import Iterator
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path

import httpx
import pytest
from prometheus_client import CollectorRegistry, Counter, generate_latest
from typer.testing import CliRunner, Result

from tinsmith.commands.cli import app, build_group
from tinsmith.commands.status_tables import Rates
from tinsmith.errors import UserError
from tinsmith.plugins.loading import Plugins
from tinsmith.store import EngineFailure, EngineRecord, EngineState
from tinsmith.testing.harness import RunningServer, running_server

KEYS = [{"key": f"tml-{name}", "tenant": name, "admin": name == "admin"} for name in ("ann", "bob", "admin")]
COLUMNS = 60


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    with running_server(tmp_path_factory.mktemp("status"), server={"api_keys": KEYS}) as running:
        yield running


@pytest.fixture
def queued(tmp_path: Path) -> Iterator[RunningServer]:
    """A server whose engine has not started, with a queued operation of each of two tenants."""
    with running_server(tmp_path, engines=False, server={"api_keys": KEYS}) as running:
        for name in ("ann", "bob"):
            with httpx.Client(base_url=f"{running.url}/api/v1/", headers={"X-API-Key": f"tml-{name}"}) as http:
                session = http.post("create_session", json={}).json()["session_id"]
                model = {"session_id": session, "model_seq_id": 0, "base_model": "toy", "lora_config": {"rank": 2}}
                assert http.post("create_model", json=model).status_code == 200
        yield running


def command(server: RunningServer, *words: str, key: str = "tml-admin") -> Result:
    return CliRunner().invoke(build_group(Plugins.load()), [*words, "--url", server.url, "--key", key])


def test_a_server_at_rest(server: RunningServer) -> None:
    while command(server, "status").exit_code != 0:
        pass  # the engine starts
    shown = command(server, "status").output
    assert f"server {server.url} up" in shown
    assert "toy ready" in shown
    assert "0 of 64 places for models are taken" in shown
    assert "free, " in shown
    found = json.loads(command(server, "status", "--json").stdout)
    assert [(each["base_model"], each["state"], each["work"]) for each in found["engines"]] == [("toy", "ready", [])]


def test_what_waits_and_why(queued: RunningServer) -> None:
    """An administrator sees all tenants, a tenant itself. Something is wrong, so the exit code is 1."""
    shown = command(queued, "status")
    assert shown.exit_code == 1
    assert "toy starting" in shown.output
    assert "waits: the engine is starting" in shown.output
    assert "waits: for a place (models: 2); one becomes free when a session ends" in shown.output
    rows = [line.split() for line in shown.output.splitlines() if "create_model" in line]
    assert [row[:4] for row in rows] == [["ann", "create_model", "0", "1"], ["bob", "create_model", "0", "1"]]
    assert "bob" not in command(queued, "status", key="tml-ann").output


def test_what_each_run_waits_for(queued: RunningServer) -> None:
    shown = command(queued, "top").output
    assert "runs that have not ended, of the newest: 2" in shown
    assert shown.count("no engine of 'toy' has started yet (") == 2
    assert "newest: 1" in command(queued, "top", key="tml-ann").output
    answers = {
        name: httpx.get(f"{queued.url}/api/v1/runs", headers={"X-API-Key": f"tml-{name}"}).json()["runs"]
        for name in ("ann", "bob", "admin")
    }
    assert [len(each) for each in answers.values()] == [1, 1, 2]
    for run in answers["admin"]:
        assert f"  {run['run_id']}, 0 steps" in shown, "whole, and :train: is no emoji"
    for run in itertools.chain(*answers.values()):
        assert run["waits_for"].pop("since_s") >= 0
        assert run["waits_for"] == {"kind": "engine", "text": "no engine of 'toy' has started yet"}


def test_the_last_failure_stays_visible_and_its_cause_is_for_operators(queued: RunningServer) -> None:
    failure = EngineFailure(
        attempt=3, text="it ended (reference 1f2e)", reference="reference 1f2e", cause="no [memory]"
    )
    ready = EngineRecord(
        base_model="toy", state=EngineState.READY, updated_at=datetime.now(UTC), restarts=3, failure=failure
    )
    queued.call(queued.store.report_engine(ready))
    while "toy ready" not in command(queued, "status").output:
        pass  # reports are kept for a moment
    shown = {key: command(queued, "status", key=key) for key in ("tml-admin", "tml-ann")}
    assert [each.exit_code for each in shown.values()] == [0, 0]
    assert "last failure, 3 restarts: it ended (no [memory]; reference 1f2e)" in shown["tml-admin"].output
    assert "last failure, 3 restarts: it ended (reference 1f2e)" in shown["tml-ann"].output


def test_memory_is_for_operators(server: RunningServer) -> None:
    """The toy backend plans none. The report of its process comes a little after it is ready."""

    def memory(key: str) -> dict[str, object] | None:
        answer = httpx.get(f"{server.url}/api/v1/engines", headers={"X-API-Key": key})
        found: dict[str, object] | None = answer.json()["engines"][0].get("memory")
        return found

    while (found := memory("tml-admin")) is None:
        pass
    assert (found["planned"], found["used_of"]) == ({}, "processes")
    assert isinstance(found["used"], int)
    assert found["used"] > 0
    assert memory("tml-ann") is None


def test_no_server(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["tinsmith", "status", "--url", "http://127.0.0.1:9"])
    with pytest.raises(SystemExit) as exited:
        app()
    assert exited.value.code == 2
    assert "cannot ask http://127.0.0.1:9: " in capsys.readouterr().err


def test_a_wrong_key(server: RunningServer) -> None:
    refused = command(server, "status", key="tml-wrong")
    assert isinstance(refused.exception, UserError)
    assert f"{server.url} answers 401" in str(refused.exception)


def test_top_prints_once_without_a_terminal(server: RunningServer) -> None:
    shown = command(server, "top")
    assert shown.exit_code == 0
    assert shown.output.count("server http://") == 1
    assert "\x1b" not in shown.output


def test_top_on_a_narrow_terminal_until_it_is_interrupted(queued: RunningServer) -> None:
    """It fits into the lines and columns, looks again, and ends with 0."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, COLUMNS, 0, 0))
    arguments = ["top", "--url", queued.url, "--key", "tml-admin", "--every", "0.5"]
    environ = {**os.environ, "TERM": "xterm", "NO_COLOR": "1"}
    environ.pop("COLUMNS", None)
    process = subprocess.Popen([sys.executable, "-m", "tinsmith", *arguments], stdout=theirs, stdin=theirs, env=environ)
    os.close(theirs)
    try:
        seen = b""
        while seen.count(b"create_model") < 4:  # two looks at two queues
            seen += os.read(ours, 1 << 16)
        process.send_signal(signal.SIGINT)
        with suppress(OSError):  # Linux ends a terminal that nobody writes to with EIO
            while more := os.read(ours, 1 << 16):
                seen += more
        assert process.wait(300) == 0
    finally:
        process.kill()
        os.close(ours)
    frames = seen.replace(b"\x1b[H", b"\n")  # each begins at the top of the terminal
    lines = re.sub(rb"\x1b\[[0-9;?]*[A-Za-z]", b"", frames).decode().splitlines()
    assert max(map(len, lines)) <= COLUMNS
    assert b"Traceback" not in seen


def test_rates_are_of_the_last_looks() -> None:
    def text(trained: float) -> str:
        registry = CollectorRegistry()
        Counter("tinsmith_tokens", "tokens", ["base_model", "of"], registry=registry).labels("toy", "trained").inc(
            trained
        )
        return generate_latest(registry).decode()

    rates = Rates()
    rates.add(text(100), 0.0)
    assert rates.of("toy", "trained") is None
    for seconds in range(2, 21, 2):
        rates.add(text(100 + (10 * seconds if seconds > 4 else 0)), float(seconds))
    assert rates.of("toy", "trained") == pytest.approx((300 - 100) / 16)  # since second 4, the last beyond 15 s
    assert rates.of("toy", "sampled") == 0.0
    rates.add(text(30), 22.0)  # its engine was started again
    assert rates.of("toy", "trained") == pytest.approx(30 / 16)
