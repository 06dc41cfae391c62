"""The store in memory keeps the contract of all stores, and is refused where it would be no use."""

import asyncio
import threading
from collections.abc import Sized
from pathlib import Path

import pytest

from tinsmith.errors import ConfigError, NotFoundError
from tinsmith.memory_store.memory import Memory
from tinsmith.memory_store.store import MemoryStore
from tinsmith.plugins.loading import Plugins
from tinsmith.processes.assembly import make_shared_store, make_store
from tinsmith.processes.before_start import look_at_store
from tinsmith.processes.engine_threads import EngineThreads
from tinsmith.settings import ModelSettings, PluginSection, ServerSettings, Settings
from tinsmith.store import EngineState
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


async def test_an_engine_that_fails_in_the_server_is_given_up(tmp_path: Path) -> None:
    model = ModelSettings(name="toy", backend=PluginSection(plugin="toy"), sampler=PluginSection(plugin="missing"))
    settings = in_memory(tmp_path, model)
    store = make_store(settings, Plugins.load())
    await store.open()
    engines = EngineThreads(settings, [model], store)
    await engines.start()
    async with asyncio.timeout(WAIT_S):
        while True:
            (record,) = await store.list_engines()
            if record.state is EngineState.FAILED:
                break
            await asyncio.sleep(0.01)  # nothing tells who only looks
    assert "the engine of 'toy' failed" in record.detail
    await engines.stop()
    await store.close()


async def test_a_server_that_stops_does_not_wait_for_an_engine_that_loads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loads, goes_on = threading.Event(), threading.Event()

    def load(*_: object) -> None:
        loads.set()
        goes_on.wait()

    monkeypatch.setattr("tinsmith.processes.engine_run.make_backends", load)
    model = ModelSettings(name="toy", backend=PluginSection(plugin="toy"))
    settings = in_memory(tmp_path, model)
    store = make_store(settings, Plugins.load())
    await store.open()
    engines = EngineThreads(settings, [model], store)
    await engines.start()
    await asyncio.to_thread(loads.wait, WAIT_S)
    await engines.stop()
    assert engines.any_left
    goes_on.set()
    await store.close()
