"""What an exception, a log line or a path says is for operators and administrators. Tenants get a reference to it."""

import errno
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from sqlalchemy.exc import OperationalError

from tinsmith.engine.models import Models
from tinsmith.errors import StoreError
from tinsmith.processes import engine_child
from tinsmith.processes.engine_child import EngineChild
from tinsmith.processes.supervisor import Supervisor
from tinsmith.server.routes import runs
from tinsmith.settings import RecoverySettings, SupervisorSettings
from tinsmith.sql_store.subjects import sessions
from tinsmith.testing.harness import RunningServer, running_server
from tinsmith.testing.store_records import a_checkpoint

SECRET = "planted-secret-7f3a"
KEYS = [{"key": f"tml-{name}", "tenant": name, "admin": name == "admin"} for name in ("sender", "neighbour", "admin")]
REFERENCE = re.compile(r"reference ([0-9a-f]{8}) in the operator's log")
FAULTY_ENGINE = f"""
import logging, sys
from tinsmith.builtin.toy_backend import ToyBackend
from tinsmith.commands import cli

right = ToyBackend.optim_step

def step(self, operations):
    if any(each.adam.learning_rate == 0.5 for each in operations):
        print("a line of the log: {SECRET}", flush=True)
        raise RuntimeError("/srv/{SECRET}/weights: the prompt was {SECRET}")
    return right(self, operations)

ToyBackend.optim_step = step
cli.app()
"""


class Tenant:
    """Sends requests, and keeps all that it is told."""

    def __init__(self, server: RunningServer, name: str | None) -> None:
        headers = {} if name is None else {"X-API-Key": f"tml-{name}"}
        self.http = httpx.Client(base_url=f"{server.url}/api/v1/", headers=headers, timeout=300)
        self.told: list[str] = []

    def post(self, path: str, /, **body: Any) -> httpx.Response:
        return self._kept(self.http.post(path, json=body))

    def look_around(self) -> None:
        for path in ("../../readyz", "readyz", "../../metrics", "training_runs", "sessions", "get_server_capabilities"):
            self._kept(self.http.get(path))
        self._kept(self.http.get("usage"))

    def _kept(self, answer: httpx.Response) -> httpx.Response:
        self.told.append(f"{answer.request.method} {answer.request.url.path}: {answer.text} {dict(answer.headers)}")
        return answer

    def model(self) -> str:
        session = self.post("create_session").json()["session_id"]
        body = {"session_id": session, "model_seq_id": 0, "base_model": "toy", "lora_config": {"rank": 2}}
        return str(self.post("create_model", **body).json()["model_id"])

    def step(self, model: str, seq_id: int, learning_rate: float) -> str:
        adam = {"learning_rate": learning_rate}
        return str(self.post("optim_step", model_id=model, seq_id=seq_id, adam_params=adam).json()["request_id"])


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RunningServer]:
    with running_server(tmp_path, engines=False, server={"api_keys": KEYS, "long_poll_s": 0.5}) as running:
        yield running


@pytest.fixture
def supervisor(server: RunningServer, monkeypatch: pytest.MonkeyPatch) -> Iterator[Supervisor]:
    """Start engines whose optimizer fails at a learning rate of 0.5."""

    def command(child: EngineChild) -> tuple[str, ...]:
        return sys.executable, "-c", FAULTY_ENGINE, "engine", child.model.name, "--config", str(child.settings_file)

    monkeypatch.setattr(engine_child, "engine_command", command)
    few = {
        "supervisor": SupervisorSettings(restart_backoff_s=0.01),
        "recovery": RecoverySettings(max_retries=1),
    }
    supervisor = Supervisor(server.settings.model_copy(update=few), server.store)
    server.call(supervisor.start())
    yield supervisor
    server.call(supervisor.stop())


@pytest.mark.usefixtures("supervisor")
def test_what_ends_an_engine_is_told_to_no_tenant(server: RunningServer, caplog: pytest.LogCaptureFixture) -> None:
    sender, neighbour, admin, stranger = (Tenant(server, name) for name in ("sender", "neighbour", "admin", None))
    models = {each: each.model() for each in (sender, neighbour)}
    fatal = sender.step(models[sender], 1, 0.5)
    harmless = neighbour.step(models[neighbour], 1, 0.1)
    while (answer := sender.post("retrieve_future", request_id=fatal)).status_code == 408:
        for each in (sender, neighbour, stranger):
            each.look_around()
        neighbour.post("retrieve_future", request_id=harmless)
    failed = answer.json()
    assert failed["category"] == "server"
    assert "ended 2 times while this optim_step ran" in failed["error"]
    while (answer := neighbour.post("retrieve_future", request_id=harmless)).status_code == 408:
        pass
    assert "metrics" in answer.json()
    told = [text for each in (sender, neighbour, stranger) for text in each.told]
    assert [text for text in told if SECRET in text] == []
    (reference,) = REFERENCE.findall(failed["error"])
    (logged,) = [each.getMessage() for each in caplog.records if f"reference {reference}" in each.getMessage()]
    assert SECRET in logged
    assert SECRET in admin.post("retrieve_future", request_id=fatal).json()["error"]


def test_a_store_that_fails_is_a_503_without_sql(
    server: RunningServer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise OperationalError("INSERT INTO sessions", {"tenant": SECRET}, OSError("database or disk is full"))

    monkeypatch.setattr(sessions, "INSERT", SimpleNamespace(run=fail))
    answer = Tenant(server, "sender").post("create_session")
    assert answer.status_code == 503
    assert int(answer.headers["retry-after"]) >= 1
    detail = answer.json()["detail"]
    assert "INSERT" not in detail
    assert SECRET not in detail
    (reference,) = REFERENCE.findall(detail)
    (logged,) = [each.getMessage() for each in caplog.records if f"reference {reference}" in each.getMessage()]
    assert "INSERT INTO sessions" in logged
    assert "INSERT INTO sessions" in Tenant(server, "admin").post("create_session").json()["detail"]


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO])
def test_a_disk_that_fails_is_a_503_without_paths(
    server: RunningServer, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def fail(root: Path, _directory: str) -> None:
        raise OSError(number, os.strerror(number), f"{root}/{SECRET}")

    server.call(server.store.add_checkpoint(a_checkpoint("a", tenant="sender")))
    monkeypatch.setattr(runs.checkpoints, "delete_checkpoint", fail)
    path = a_checkpoint("a").path.removeprefix("tinker://").replace("/weights/", "/checkpoints/weights/")
    answer = Tenant(server, "sender").http.delete(f"training_runs/{path}")
    assert answer.status_code == 503, answer.text
    assert int(answer.headers["retry-after"]) >= 1
    assert SECRET not in answer.text
    assert REFERENCE.search(answer.text)


def test_a_result_that_the_store_refused_tells_no_sql(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error of another layer, in an operation that fails by itself."""

    async def fail(*_: object) -> None:
        raise StoreError(f"the request store failed: INSERT {SECRET}")

    monkeypatch.setattr(Models, "capture", fail)
    with running_server(tmp_path, server={"api_keys": KEYS}) as server:
        sender = Tenant(server, "sender")
        saved = sender.post("save_weights", model_id=sender.model(), seq_id=1, path="a").json()
        while (answer := sender.post("retrieve_future", **saved)).status_code == 408:
            pass
        seen = Tenant(server, "admin").post("retrieve_future", **saved)
    assert answer.json()["category"] == "server"
    assert SECRET not in answer.text
    assert REFERENCE.search(answer.text)
    assert SECRET in seen.text
