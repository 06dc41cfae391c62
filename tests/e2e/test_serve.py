"""`tinsmith serve` as a process: what it says, what it refuses, and that nothing of it stays behind."""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import httpx
import psutil
import pytest
import tinker
from forked import Forked
from processes import Launcher

from tinsmith.commands.open_store import use_store
from tinsmith.errors import ConfigError
from tinsmith.log_fields import FIELDS
from tinsmith.plugins.loading import Plugins
from tinsmith.settings import PluginSection, ServerSettings, Settings
from tinsmith.store import RequestStore

START_S = 300


class Served:
    """A server process with the toy backend; its output is read line by line."""

    def __init__(self, data_dir: Path, *arguments: str, launcher: Launcher | None = None) -> None:
        """With a launcher the server is forked. Its engine is always started as it is shipped."""
        command = ["-m", "tinsmith", "serve", "--base-model", "tiny", "--backend", "toy"]
        command += ["--port", "0", "--data-dir", str(data_dir), *arguments]
        environ = {name: value for name, value in os.environ.items() if not name.startswith("TINSMITH_")}
        self.data_dir = data_dir
        self.lines: list[str] = []
        read, write = os.pipe()
        with os.fdopen(write, "wb") as errors:
            self.process: subprocess.Popen[bytes] | Forked = (
                subprocess.Popen([sys.executable, *command], stderr=errors, env=environ, start_new_session=True)
                if launcher is None
                else Forked(launcher, *command, environ=environ, errors=errors)
            )
        self._errors = os.fdopen(read)
        self._news = threading.Condition()
        self._ended = False
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        for line in self._errors:
            with self._news:
                self.lines.append(line.rstrip())
                self._news.notify_all()
        with self._news:
            self._ended = True
            self._news.notify_all()

    def wait_for_line(self, start: str, *, logged: bool = False) -> str:
        """Wait for a line with this beginning. `logged`: of the message, with `--log-format json`."""
        start = f'"message": "{start}' if logged else start

        def found() -> str | None:
            return next((line for line in self.lines if (start in line if logged else line.startswith(start))), None)

        with self._news:
            self._news.wait_for(lambda: found() or self._ended, START_S)
            line = found()
        assert line is not None, self.text
        return line

    @property
    def text(self) -> str:
        return "\n".join(self.lines)

    @property
    def url(self) -> str:
        return str(json.loads((self.data_dir / "server.lock").read_text())["url"])

    def wait(self) -> int:
        """Return the exit status, once all that it wrote has been read."""
        code = self.process.wait(START_S)
        with self._news:
            self._news.wait_for(lambda: self._ended, START_S)
        return code

    def engines(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children(recursive=True)

    def close(self) -> None:
        family = [psutil.Process(self.process.pid), *self.engines()] if self.process.poll() is None else []
        for each in family:
            with suppress(psutil.NoSuchProcess):  # an engine ends by itself when its server is gone
                each.kill()
        self.process.wait()
        self._reader.join(START_S)
        self._errors.close()


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Callable[..., Served]]:
    started: list[Served] = []

    def start(*arguments: str, launcher: Launcher | None = None) -> Served:
        started.append(Served(tmp_path / "data", *arguments, launcher=launcher))
        return started[-1]

    yield start
    for each in started:
        each.close()


@pytest.mark.slow
def test_a_life(serve: Callable[..., Served], launcher: Launcher) -> None:
    """Start, say how to connect, answer, refuse a second server, stop in order, leave nothing."""
    server = serve()
    server.wait_for_line("ready tiny")
    with urllib.request.urlopen(f"{server.url}/readyz") as answer:
        assert json.load(answer)["status"] == "ok"
    assert "tinsmith 0." in server.lines[0]
    assert "import tinker" in server.text
    assert f'base_url="{server.url}"' in server.text
    assert 'base_model="tiny"' in server.text

    second = serve(launcher=launcher)
    assert second.wait() == 2
    assert "is in use by another server" in " ".join(second.text.split())
    assert server.url in second.text.replace("\n", "")

    engines = server.engines()
    assert engines
    server.process.send_signal(signal.SIGTERM)
    assert server.wait() == 0
    assert not psutil.wait_procs(engines, START_S)[1]
    assert "stopping; press Ctrl-C again to stop at once" in server.text


@pytest.mark.slow
def test_the_log_as_json(serve: Callable[..., Served], launcher: Launcher) -> None:
    """Every line is an object. Sessions, runs, saves and refusals have one each, and none has what a tenant sent."""
    server = serve("--log-format", "json", "--log-level", "debug", launcher=launcher)
    server.wait_for_line("ready tiny", logged=True)
    client = tinker.ServiceClient(base_url=server.url, api_key="tml-test")
    training = client.create_lora_training_client("tiny", rank=4).result()
    training.save_state("first").result()
    text, token = "planted-text-7f3a", 7_654_321
    prompt = tinker.ModelInput.from_ints([token])
    with pytest.raises(tinker.TinkerError):  # the trainer has no such token
        training.forward_backward([tinker.Datum(model_input=prompt, loss_fn_inputs={})], "cross_entropy").result()
    headers = {"X-API-Key": "tml-test", "X-Request-Id": "proxy-1"}
    body = {"session_id": text, "model_seq_id": text, "base_model": text}
    refused = httpx.post(f"{server.url}/api/v1/create_model", json=body, headers=headers)
    assert refused.status_code == 422
    client.close("success").result(timeout=START_S)
    server.process.send_signal(signal.SIGTERM)
    assert server.wait() == 0

    lines = [json.loads(line) for line in server.lines]
    assert {"time", "level", "logger", "message"} <= set.intersection(*(set(line) for line in lines))
    informed = [line for line in lines if line["level"] == "info"]
    session, run = training.model_id.partition(":")[0], training.model_id

    tenant = next(line["tenant"] for line in informed if "tenant" in line)

    def of(start: str) -> dict[str, str]:
        (found,) = [line for line in informed if line["message"].startswith(start)]
        return {name: found[name] for name in FIELDS if name in found}

    assert of(f"session {session} began") == {"tenant": tenant}
    assert of(f"session {session} ended: success") == {"tenant": tenant}
    for kind in ("create_model request=", "save_state request="):
        found = of(kind)
        assert found.pop("request_id")
        assert found == {"base_model": "tiny", "tenant": tenant, "run": run}
    assert of("refused forward_backward") == {"tenant": tenant, "run": run}
    assert of(f"refused POST /api/v1/create_model of {tenant}: 422") == {"tenant": tenant, "x_request_id": "proxy-1"}
    assert [line for line in server.lines if text in line or str(token) in line] == []


@pytest.mark.slow
def test_the_second_signal_stops_at_once(serve: Callable[..., Served], launcher: Launcher) -> None:
    server = serve(launcher=launcher)
    server.wait_for_line("ready tiny")
    engines = server.engines()
    for engine in engines:
        engine.suspend()  # it would not answer SIGTERM
    server.process.send_signal(signal.SIGINT)
    server.wait_for_line("stopping")
    server.process.send_signal(signal.SIGINT)
    assert server.wait() == 130
    assert not psutil.wait_procs(engines, START_S)[1]


@pytest.mark.slow
def test_a_store_in_memory_survives_its_engine_and_ends_with_its_server(
    serve: Callable[..., Served], launcher: Launcher, tmp_path: Path
) -> None:
    """The next server starts in the same directory, though recovery points are left there."""
    data_dir = tmp_path / "data"
    for _ in range(2):
        server = serve("--store", "memory", "--store.directory", str(tmp_path / "memory"), launcher=launcher)
        server.wait_for_line("ready tiny")
        client = tinker.ServiceClient(base_url=server.url, api_key="tml-test")
        training = client.create_lora_training_client("tiny", rank=4).result()
        assert training.optim_step(tinker.AdamParams()).result() is not None
        [engine] = server.engines()
        engine.kill()
        assert training.optim_step(tinker.AdamParams()).result() is not None
        assert runs_in_memory(data_dir) == 1
        server.process.send_signal(signal.SIGTERM)
        assert server.wait() == 0
        client.holder.close()
        assert list((tmp_path / "memory").iterdir()) == []
        assert not (data_dir / "tinsmith.db").exists()
        (data_dir / "recovery" / "tiny" / "left").mkdir(parents=True, exist_ok=True)
    with pytest.raises(ConfigError, match="no server runs on"):
        runs_in_memory(data_dir)


def runs_in_memory(data_dir: Path) -> int:
    """Return how many runs a process beside the server finds."""
    settings = Settings(server=ServerSettings(data_dir=data_dir), store=PluginSection(plugin="memory"))

    async def number(store: RequestStore) -> int:
        return len((await store.list_runs(None, limit=9, offset=0))[0])

    return use_store(settings, Plugins.load(), number)


@pytest.mark.slow
def test_a_killed_server_takes_its_engines_with_it(serve: Callable[..., Served], launcher: Launcher) -> None:
    server = serve(launcher=launcher)
    server.wait_for_line("ready tiny")
    engines = server.engines()
    server.process.kill()
    assert not psutil.wait_procs(engines, START_S)[1]


STUCK = """
import ctypes
from dataclasses import replace
from pathlib import Path
import tinsmith
from tinsmith.builtin import toy_backend

def load(config, context):
    Path(__file__).with_name("stuck").touch()
    ctypes.PyDLL(None).sleep(3600)  # holds the interpreter

@tinsmith.hookimpl
def tinsmith_register_backends():
    return replace(toy_backend.tinsmith_register_backends(), name="stuck", create=load)
"""


@pytest.mark.slow
def test_an_engine_in_native_code_ends_with_its_killed_server(
    serve: Callable[..., Served], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It holds the interpreter, so no thread of its own could end it."""
    site = tmp_path / "site"
    metadata = site / "tinsmith_stuck-1.0.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: tinsmith-stuck\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text("[tinsmith]\nstuck = tinsmith_stuck\n")
    (site / "tinsmith_stuck.py").write_text(STUCK)
    monkeypatch.setenv("PYTHONPATH", str(site))
    server = serve("--backend", "stuck")
    deadline = time.monotonic() + START_S
    while not (site / "stuck").exists():
        assert time.monotonic() < deadline
        assert server.process.poll() is None, server.text
        time.sleep(0.05)
    engines = server.engines()
    assert engines
    server.process.kill()
    _, left = psutil.wait_procs(engines, 60)
    for engine in left:
        engine.kill()
    assert not left


def test_a_port_in_use(serve: Callable[..., Served], launcher: Launcher) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        server = serve("--port", port, launcher=launcher)
        assert server.wait() == 2
    assert f"server.port: {port} is in use on 127.0.0.1; choose another with --port" in " ".join(server.text.split())


_WITHOUT_APP = """
import sys
from pathlib import Path

import psutil
import tinsmith
from tinsmith.errors import PluginError
from tinsmith.plugins.loading import Plugins
from tinsmith.processes.data_dir_lock import DataDirLock
from tinsmith.processes.serve import serve
from tinsmith.settings import PluginSection, ServerSettings, Settings
from tinsmith.testing.harness import TOY

class Shadow:
    @tinsmith.hookimpl
    def tinsmith_register_losses(self):
        return tinsmith.LossSpec(name="ppo", inputs=(), per_token=lambda *_: (0, 0))

server = ServerSettings(data_dir=Path(sys.argv[1]), port=0)
settings = Settings(server=server, store=PluginSection(plugin="sql"), models=(TOY,))
try:
    serve(settings, Plugins.load([Shadow()]))
except PluginError as error:
    print(error)
print(psutil.Process().children())
with DataDirLock(settings.data_dir):
    print("free")
"""


def test_an_app_that_cannot_be_made_leaves_no_engine(tmp_path: Path) -> None:
    """Engines are started first."""
    command = [sys.executable, "-c", _WITHOUT_APP, str(tmp_path)]
    ran = subprocess.run(command, check=True, capture_output=True, text=True)
    error, children, lock = ran.stdout.splitlines()
    assert "loss 'ppo' is offered by" in error
    assert children == "[]"
    assert lock == "free"
