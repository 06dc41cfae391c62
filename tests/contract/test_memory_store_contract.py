"""The store in memory keeps the contract of all stores, and is refused where it would be no use."""

import asyncio
import threading
from collections.abc import AsyncIterator, Sized
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import NoReturn

import pytest

from tinsmith.errors import ConfigError, NotFoundError
from tinsmith.memory_store.memory import Memory
from tinsmith.memory_store.store import MemoryStore
from tinsmith.plugins.loading import Plugins
from tinsmith.processes import engine_thread
from tinsmith.processes.assembly import make_shared_store, make_store
from tinsmith.processes.before_start import look_at_store
from tinsmith.processes.engine_thread import EngineThread
from tinsmith.settings import ModelSettings, PluginSection, ServerSettings, Settings, WatchdogSettings
from tinsmith.store import EngineState, RequestStore
from tinsmith.testing.engine_driver import WAIT_S
from tinsmith.testing.store_contract import RequestStoreContract
from tinsmith.testing.store_records import MakeStore, a_run, a_session, an_operation


class TestMemoryStore(RequestStoreContract):
    @pytest.fixture
    def make_store(self) -> MakeStore:
        memory = Memory()
        return lambda: MemoryStore(memory)


def in_memory(data_dir: Path, *models: ModelSettings, shared: bool = False) -> Settings:
    server = ServerSettings(data_dir=data_dir, share_data_dir=shared)
    return Settings(server=server, store=PluginSection(plugin="memory"), models=models)


async def test_stores_on_one_data_directory_share_what_they_hold_in_this_process_alone(tmp_path: Path) -> None:
    settings, plugins = in_memory(tmp_path), Plugins.load()
    one, two, elsewhere = [make_store(each, plugins) for each in (settings, settings, in_memory(tmp_path / "other"))]
    for each in (one, two, elsewhere):
        await each.open()
    await one.create_session(a_session(), idempotency_key=None)
    found = [len(await each.list_sessions(None, limit=9, offset=0)) for each in (one, two, elsewhere)]
    assert found == [1, 1, 0]
    for each in (one, two, elsewhere):
        await each.close()
    with pytest.raises(ConfigError, match="lives in the process of its server"):
        make_shared_store(settings, plugins)


async def test_who_asks_for_what_is_not_there_leaves_nothing() -> None:
    """A client chooses the numbers that it asks with."""
    memory = Memory()
    store = MemoryStore(memory)
    await store.open()
    await store.create_session(a_session(), idempotency_key=None)
    await store.create_run(a_run(), an_operation())
    before = sizes(memory)
    await store.finished_samples("s1:sample:0", 12345, after=0, limit=9, timeout_s=0)
    await store.list_log("unknown", from_seq_id=None, limit=9)
    await store.log_totals("unknown")
    await store.replayable("unknown", after_seq_id=-1, limit=9)
    await store.failed_pass("unknown", after_seq_id=None, before_seq_id=9)
    with pytest.raises(NotFoundError):
        await store.submit(an_operation("unknown"))
    assert sizes(memory) == before
    await store.close()


def sizes(memory: Memory) -> dict[str, int]:
    return {name: len(found) for name, found in vars(memory).items() if isinstance(found, Sized)}


@pytest.mark.parametrize("kept", ["tinsmith.db", "recovery/x", "snapshots/x"])
def test_it_is_refused_where_a_durable_store_keeps_something(tmp_path: Path, kept: str) -> None:
    (tmp_path / kept).mkdir(parents=True)
    with pytest.raises(ConfigError, match=kept.partition("/")[0]):
        look_at_store(in_memory(tmp_path), Plugins.load())


def test_several_servers_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot share a store in memory"):
        look_at_store(in_memory(tmp_path, shared=True), Plugins.load())


@pytest.mark.parametrize(
    ("failure", "code"), [(ConfigError("no such device"), 2), (ValueError("broken"), 1), (SystemExit("left"), 1)]
)
async def test_a_server_ends_with_its_engine(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    failure: BaseException,
    code: int,
) -> None:
    """Whatever ends the engine, a plugin's SystemExit too; with the exit code of an engine's own process."""

    def fail() -> NoReturn:
        raise failure

    monkeypatch.setattr(engine_thread, "Plugins", SimpleNamespace(load=fail))
    async with running_engine(tmp_path) as (engine, store):
        async with asyncio.timeout(WAIT_S):
            await engine.failed.wait()
        (record,) = await store.list_engines()
    assert record.state is EngineState.FAILED
    assert "the engine of 'toy' failed (reference" in record.detail
    assert engine.exit_code == code
    assert f"the engine of 'toy' failed: {failure}; the server ends, and every session" in caplog.text


async def test_a_server_says_why_it_ends_when_a_call_does_not_return(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    goes_on, words = threading.Event(), list[str]()

    def end(why: str) -> None:
        words.append(why)
        goes_on.set()

    monkeypatch.setattr("tinsmith.processes.engine_run.make_backends", lambda *_: goes_on.wait())
    monkeypatch.setattr(engine_thread, "end_process", end)
    async with running_engine(tmp_path, WatchdogSettings(least_s=0.05, first_s=0.05, most_s=0.05)):
        assert await asyncio.to_thread(goes_on.wait, WAIT_S)
    assert "the engine of 'toy': loading did not return within 0.05 s" in words[0]
    assert "every session, model, operation and result that it held in memory is gone" in words[0]


@asynccontextmanager
async def running_engine(
    data_dir: Path, watchdog: WatchdogSettings | None = None
) -> AsyncIterator[tuple[EngineThread, RequestStore]]:
    model = ModelSettings(name="toy", backend=PluginSection(plugin="toy"))
    settings = in_memory(data_dir, model)
    if watchdog is not None:
        settings = settings.model_copy(update={"watchdog": watchdog})
    store = make_store(settings, Plugins.load())
    await store.open()
    engine = EngineThread(settings, model, store)
    await engine.start()
    yield engine, store
    await engine.stop()
    await store.close()


async def test_a_server_that_stops_does_not_wait_for_an_engine_that_loads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loads, goes_on = threading.Event(), threading.Event()

    def load(*_: object) -> None:
        loads.set()
        goes_on.wait()

    monkeypatch.setattr("tinsmith.processes.engine_run.make_backends", load)
    async with running_engine(tmp_path) as (engine, _):
        await asyncio.to_thread(loads.wait, WAIT_S)
        await engine.stop()
        assert engine.exit_code == 0
        goes_on.set()
