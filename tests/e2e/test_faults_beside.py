"""What a server and an engine do beside their work raises once each: it is logged, it goes on, and they serve."""

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tinsmith.backend import SamplingBackend
from tinsmith.plugins.loading import Plugins
from tinsmith.processes import throughput
from tinsmith.processes.engine import serve_engine
from tinsmith.settings import ModelSettings, PluginSection, ServerSettings, Settings
from tinsmith.sql_store.config import SqlStoreConfig
from tinsmith.sql_store.store import SqlStore
from tinsmith.store import EngineState, StoreContext
from tinsmith.testing.engine_driver import WAIT_S, EngineDriver

START_S = 300

SERVER = """
import gc, runpy, sys
from tinsmith.processes import data_dir_lock, display, garbage
from tinsmith.server import hearing
from tinsmith.sql_store.store import SqlStore

def raise_once(owner, name, when=lambda options: True):
    call, calls = getattr(owner, name), 0
    def failing(*arguments, **options):
        nonlocal calls
        calls += when(options)
        if calls == 1 and when(options):
            raise RuntimeError(f"a fault in {name}")
        if calls == 2:
            print(f"again: {name}", file=sys.stderr, flush=True)
        return call(*arguments, **options)
    setattr(owner, name, failing)

raise_once(SqlStore, "expired_checkpoints")
raise_once(SqlStore, "expect_writes")
raise_once(hearing.Hearing, "watch")
raise_once(display.EngineDisplay, "update")
raise_once(data_dir_lock.DataDirLock, "describe", lambda options: options.get("url") is not None)
garbage.OLD_EVERY_S = 0.05
raise_once(gc, "collect", lambda _: sys._getframe(2).f_code.co_name == "collect_old")
sys.argv[0] = "tinsmith"
runpy.run_module("tinsmith", run_name="__main__")
"""

AGAIN = ("expired_checkpoints", "expect_writes", "watch", "update", "describe", "collect")


@pytest.mark.slow
def test_a_server_goes_on(tmp_path: Path) -> None:
    """Before, any of them ended the server."""
    command = [sys.executable, "-c", SERVER, "serve", "--base-model", "tiny", "--backend", "toy", "--port", "0"]
    command += ["--data-dir", str(tmp_path)]
    environ = {name: value for name, value in os.environ.items() if not name.startswith("TINSMITH_")}
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environ, start_new_session=True) as server:
        assert server.stderr is not None
        lines, missing = [], {f"again: {name}" for name in AGAIN}
        for line in server.stderr:  # the test's time-out ends this
            lines.append(line.rstrip())
            missing.discard(lines[-1])
            if not missing and any(each.startswith("ready tiny") for each in lines):
                server.send_signal(signal.SIGTERM)
                missing.add("the end")
        assert server.wait(START_S) == 0, "\n".join(lines)
    text = "\n".join(lines)
    assert missing == {"the end"}, text
    assert text.count("failed, and starts again in") == len(AGAIN), text
    assert [name for name in AGAIN if f"RuntimeError: a fault in {name}" not in text] == []


async def test_an_engine_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    faults = {"report_figures": "figure-reports", "report_engine": "engine-reports", "list_pending": "throughput"}
    for name, task in faults.items():
        _raise_once_in(monkeypatch, name, task)
    monkeypatch.setattr(throughput, "EVERY_S", 0.05)
    looks = iter([RuntimeError("a fault in trouble")])
    monkeypatch.setattr(SamplingBackend, "trouble", property(lambda _: _raised(next(looks, None)) or "it is slow"))
    model = ModelSettings(name="org/toy", backend=PluginSection(plugin="toy"))
    settings = Settings(server=ServerSettings(data_dir=tmp_path), models=(model,))
    store = SqlStore(SqlStoreConfig(), StoreContext(data_dir=tmp_path))
    await store.open()
    stopping = asyncio.Event()
    engine = asyncio.create_task(serve_engine(settings, model.name, Plugins.load(), stopping=stopping))
    try:
        client = EngineDriver(store, model.name)
        await client.open_session()
        await client.result(await client.create_model())
        async with asyncio.timeout(WAIT_S):
            tasks = (*faults.values(), "sampler-watch")
            while not all(f"{task} failed, and starts again" in caplog.text for task in tasks):  # noqa: ASYNC110 - logged by tasks
                await asyncio.sleep(0.02)
            while (await client.engine()).sampler_trouble != "it is slow":  # noqa: ASYNC110 - reported by a task
                await asyncio.sleep(0.02)
        assert not engine.done()
        assert (await client.engine()).state is EngineState.READY
    finally:
        stopping.set()
        await engine
        await store.close()


def _raised(error: Exception | None) -> None:
    if error is not None:
        raise error


def _raise_once_in(monkeypatch: pytest.MonkeyPatch, name: str, task: str) -> None:
    call, failed = getattr(SqlStore, name), False

    async def failing(*arguments: object, **options: object) -> object:
        nonlocal failed
        running = asyncio.current_task()
        if running is not None and running.get_name() == task and not failed:
            failed = True
            msg = f"a fault in {name}"
            raise RuntimeError(msg)
        return await call(*arguments, **options)

    monkeypatch.setattr(SqlStore, name, failing)
