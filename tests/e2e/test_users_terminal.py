"""What a user's terminal shows while a server loads, crash-loops or has failed: a process with the real SDK."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from tinsmith.processes import engine_child
from tinsmith.processes.supervisor import Supervisor
from tinsmith.settings import SupervisorSettings
from tinsmith.store import EngineRecord, EngineState
from tinsmith.testing.harness import RunningServer, running_server

CAUSE = "RuntimeError: /srv/planted/weights are cut off"
KEYS = [{"key": f"tml-{name}", "tenant": name, "admin": name == "admin"} for name in ("ann", "admin")]
SHORT = {"long_poll_s": 0.05}
# Ends until it has been started so often, then loads for ever.
ENGINE = f"""
import sys
from pathlib import Path
starts = Path(sys.argv[1])
number = len(starts.read_bytes()) + 1 if starts.exists() else 1
starts.write_bytes(b"x" * number)
if number <= int(sys.argv[2]):
    sys.exit({CAUSE!r})
sys.stdin.read()
"""
SCRIPT = """
import sys, tinker
url, then, *keys = sys.argv[1:]
for key in keys:
    print(f"with {key}", file=sys.stderr)
    created = tinker.ServiceClient(base_url=url, api_key=key).create_lora_training_client(base_model="toy", rank=2)
if then == "wait":
    created.result()
"""


@contextmanager
def crashing(server: RunningServer, directory: Path, monkeypatch: pytest.MonkeyPatch, *, times: int) -> Iterator[None]:
    """Start an engine that crashes so often before it loads. After three crashes, it is given up."""
    command = (sys.executable, "-S", "-c", ENGINE, str(directory / "starts"), str(times))
    monkeypatch.setattr(engine_child, "engine_command", lambda _: command)
    supervision = SupervisorSettings(restart_backoff_s=0.01, max_restarts=2)
    supervisor = Supervisor(server.settings.model_copy(update={"supervisor": supervision}), server.store)
    server.call(supervisor.start())
    try:
        yield
    finally:
        server.call(supervisor.stop())


def until(server: RunningServer, state: EngineState, attempt: int) -> None:
    def reached(record: EngineRecord) -> bool:
        return record.state is state and record.failure is not None and record.failure.attempt == attempt

    while not any(map(reached, server.call(server.store.list_engines()))):
        pass


def terminal(server: RunningServer, *arguments: str) -> str:
    """Return all that the SDK prints, as an ordinary script does not set up logging."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("TINKER_")}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, server.url, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env=environment,
        text=True,
        timeout=600,
        check=False,
    )
    return done.stdout


def test_a_crash_loop_is_told_when_a_session_begins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with (
        running_server(tmp_path, engines=False, server={**SHORT, "api_keys": KEYS}) as server,
        crashing(server, tmp_path, monkeypatch, times=2),
    ):
        until(server, EngineState.RESTARTING, 2)
        before, _, rest = terminal(server, "leave", "tml-ann", "tml-admin").partition("with tml-ann")
        tenant, _, admin = rest.partition("with tml-admin")
    assert before == ""
    for told in (tenant, admin):
        assert "restarting, attempt 2: the engine of 'toy' ended with exit code 1 (" in told
        assert "restarting in 0.02 s. Requests wait until it is ready" in told
        assert "in the operator's log)" in told
    assert "planted" not in tenant
    assert f"({CAUSE}; reference " in admin


def test_an_engine_that_has_failed_fails_what_is_created_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without keys, whoever asks is the operator."""
    with (
        running_server(tmp_path, engines=False, server=SHORT) as server,
        crashing(server, tmp_path, monkeypatch, times=9),
    ):
        until(server, EngineState.FAILED, 2)
        session, _, created = terminal(server, "wait", "tml-local").partition("Traceback")
        ready = httpx.get(f"{server.url}/readyz", timeout=300)
    assert f"'toy' cannot be served: failed, attempt 2: the engine of 'toy' ended with exit code 1 ({CAUSE}" in session
    assert "RequestFailedError" in created
    assert f"base model 'toy' cannot be served: the engine of 'toy' ended with exit code 1 ({CAUSE}" in created
    assert ready.status_code == 503
    assert CAUSE in ready.json()["engines"]["toy"]["detail"]
