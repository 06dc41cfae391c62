"""Engine processes: started, watched, restarted, given up, and never left behind."""

import asyncio
import json
import os
import signal
import stat
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import psutil
import pytest

from tinsmith import operations as ops
from tinsmith import supervisor as supervisor_module
from tinsmith.settings import ApiKey, ModelSettings, PluginSection, ServerSettings, Settings, SupervisorSettings
from tinsmith.sql_store.config import SqlStoreConfig
from tinsmith.sql_store.store import SqlStore
from tinsmith.store import EngineRecord, EngineState, RunState, StoreContext
from tinsmith.supervisor import Supervisor
from tinsmith.testing.engine_driver import WAIT_S, EngineDriver

TOY = ModelSettings(name="org/toy", backend=PluginSection(plugin="toy"))


def settings_for(tmp_path: Path, *models: ModelSettings, max_restarts: int = 3) -> Settings:
    return Settings(
        server=ServerSettings(
            data_dir=tmp_path, api_keys=(ApiKey.model_validate({"key": "tml-secret", "tenant": "ann"}),)
        ),
        supervisor=SupervisorSettings(restart_backoff_s=0.01, max_restarts=max_restarts),
        models=models or (TOY,),
    )


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[SqlStore]:
    store = SqlStore(SqlStoreConfig(), StoreContext(data_dir=tmp_path))
    await store.open()
    yield store
    await store.close()


@asynccontextmanager
async def supervised(settings: Settings, store: SqlStore) -> AsyncIterator[Supervisor]:
    supervisor = Supervisor(settings, store)
    await supervisor.start()
    try:
        yield supervisor
    finally:
        await supervisor.stop()
    assert psutil.Process().children() == []


async def until(store: SqlStore, condition: Callable[[EngineRecord], bool], base_model: str = TOY.name) -> EngineRecord:
    """Look at what the engine reports until it is as expected."""
    async with asyncio.timeout(WAIT_S):
        while True:
            for record in await store.list_engines():
                if record.base_model == base_model and condition(record):
                    return record
            await asyncio.sleep(0.02)  # the engine needs the processor, too


async def ready(store: SqlStore) -> EngineRecord:
    return await until(store, lambda record: record.state == EngineState.READY)


def use_command(monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    monkeypatch.setattr(supervisor_module, "_command", lambda _: (sys.executable, "-c", script))


async def test_a_killed_engine_is_replaced_and_its_models_go_on(tmp_path: Path, store: SqlStore) -> None:
    client = EngineDriver(store, TOY.name)
    await client.open_session()
    step = ops.OptimStep(model_id=client.model_id(), adam=ops.AdamParams())
    async with supervised(settings_for(tmp_path), store):
        first = await ready(store)
        assert first.capabilities is not None
        assert first.capabilities.sampling
        assert first.pid is not None
        await client.result(await client.create_model())
        await client.run(step)
        os.kill(first.pid, signal.SIGKILL)
        second = await until(store, lambda record: record.state == EngineState.READY and record.pid != first.pid)
        assert second.restarts == 1
        assert isinstance(await client.run(step), ops.OptimStepOutput)
    assert (await store.list_engines())[0].state == EngineState.STOPPED
    async with supervised(settings_for(tmp_path), store):  # an orderly stop keeps them as well
        assert isinstance(await client.run(step), ops.OptimStepOutput)
        run = await store.get_run(client.model_id())
        assert (run.state, run.state_reason, run.applied_seq_id) == (RunState.READY, None, 3)


async def test_two_models_have_an_engine_each(tmp_path: Path, store: SqlStore) -> None:
    other = TOY.model_copy(update={"name": "other"})
    async with supervised(settings_for(tmp_path, TOY, other), store):
        engines = [await ready(store), await until(store, lambda it: it.state == EngineState.READY, "other")]
        assert len({engine.pid for engine in engines}) == 2


async def test_a_wrong_configuration_is_given_up_at_once(tmp_path: Path, store: SqlStore) -> None:
    missing = ModelSettings(name="broken", path=tmp_path / "missing", backend=PluginSection(plugin="toy"))
    client = EngineDriver(store, "broken")
    await client.open_session()
    waiting = await client.create_model()
    async with supervised(settings_for(tmp_path, missing), store):
        failed = await client.failure(waiting)
        assert failed.category == "server"
        assert "there is no directory" in failed.message
        engine = await client.engine()
        assert (engine.state, engine.restarts) == (EngineState.FAILED, 0)


async def test_an_engine_that_dies_again_and_again_is_given_up(
    tmp_path: Path, store: SqlStore, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    use_command(monkeypatch, "import sys; print('no such device'); sys.exit(7)")
    client = EngineDriver(store, TOY.name)
    await client.open_session()
    waiting = await client.create_model()
    async with supervised(settings_for(tmp_path, max_restarts=2), store):
        message = (await client.failure(waiting)).message
        assert "ended with exit code 7: no such device" in message
        engine = await client.engine()
        assert (engine.state, engine.restarts) == (EngineState.FAILED, 2)
        assert "exit code 7" in (await client.failure(await client.create_model(1))).message
    assert capfd.readouterr().err.count("[org/toy] no such device") == 3


async def test_the_settings_reach_the_engine_privately_and_without_keys(
    tmp_path: Path, store: SqlStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TINSMITH_SERVER__PORT", "1")
    monkeypatch.setenv("TINSMITH_OTHER", "2")
    seen = tmp_path / "seen.json"
    script = f"import os, json; json.dump(dict(os.environ), open({str(seen)!r}, 'w')); input()"
    use_command(monkeypatch, script)
    async with supervised(settings_for(tmp_path), store) as supervisor:
        child = supervisor._children[0]
        file = child.settings_file
        await until(store, lambda _: file.exists() and file.stat().st_size > 0)
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
        assert stat.S_IMODE(file.parent.stat().st_mode) == 0o700
        content = json.loads(file.read_text())
        assert content["models"][0]["name"] == TOY.name
        assert "tml-secret" not in file.read_text()
        await until(store, lambda _: seen.exists() and seen.read_text().endswith("}"))
        environment = json.loads(seen.read_text())
        assert "TINSMITH_SERVER__PORT" not in environment
        assert environment["TINSMITH_OTHER"] == "2"
    assert not file.exists()


async def test_an_engine_that_does_not_stop_is_killed(
    tmp_path: Path, store: SqlStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor_module, "_STOP_S", 0.1)
    deaf = tmp_path / "deaf"
    use_command(
        monkeypatch,
        "import signal, pathlib, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); "
        f"pathlib.Path({str(deaf)!r}).touch(); time.sleep(600)",
    )
    async with supervised(settings_for(tmp_path), store):
        await until(store, lambda _: deaf.exists())


async def test_an_engine_ends_with_its_supervisor(tmp_path: Path, store: SqlStore) -> None:
    script = tmp_path / "supervise.py"
    script.write_text(
        "import asyncio, sys\n"
        "from pathlib import Path\n"
        "from tinsmith.settings import Settings\n"
        "from tinsmith.sql_store.config import SqlStoreConfig\n"
        "from tinsmith.sql_store.store import SqlStore\n"
        "from tinsmith.store import StoreContext\n"
        "from tinsmith.supervisor import Supervisor\n"
        "async def main():\n"
        "    settings = Settings.model_validate_json(sys.argv[1])\n"
        "    store = SqlStore(SqlStoreConfig(), StoreContext(data_dir=settings.server.data_dir))\n"
        "    await store.open()\n"
        "    await Supervisor(settings, store).start()\n"
        "    await asyncio.sleep(600)\n"
        "asyncio.run(main())\n"
    )
    settings = settings_for(tmp_path)
    settings = settings.model_copy(update={"server": settings.server.model_copy(update={"api_keys": ()})})
    process = await asyncio.create_subprocess_exec(sys.executable, str(script), settings.model_dump_json())
    try:
        engine = psutil.Process((await ready(store)).pid)
        os.kill(process.pid, signal.SIGKILL)
        await process.wait()
        await asyncio.to_thread(engine.wait, WAIT_S)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def test_a_second_engine_of_a_base_model_is_refused(
    tmp_path: Path, store: SqlStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tinsmith import engine_process
    from tinsmith.errors import ConfigError
    from tinsmith.plugins import Plugins

    monkeypatch.setattr(engine_process, "_LOCK_WAIT_S", 0.0)
    settings = settings_for(tmp_path)
    async with supervised(settings, store):
        await ready(store)
        with pytest.raises(ConfigError, match="another engine serves 'org/toy'"):
            await engine_process.serve_engine(settings, TOY.name, Plugins.load(), stopping=asyncio.Event())


async def test_an_engine_of_no_configured_model(tmp_path: Path) -> None:
    from tinsmith.engine_process import serve_engine
    from tinsmith.errors import ConfigError
    from tinsmith.plugins import Plugins

    with pytest.raises(ConfigError, match="no model named 'x'; configured: 'org/toy'"):
        await serve_engine(settings_for(tmp_path), "x", Plugins.load(), stopping=asyncio.Event())
