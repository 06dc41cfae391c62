"""A store in memory is SQLite in a scratch directory, which a server holds, and is refused where it would do harm."""

from pathlib import Path

import pytest

from tinsmith.errors import ConfigError
from tinsmith.plugins.loading import Plugins
from tinsmith.processes.assembly import hold_store, make_store
from tinsmith.processes.before_start import look_at_store
from tinsmith.settings import PluginSection, ServerSettings, Settings
from tinsmith.testing.store_records import a_session


def in_memory(tmp_path: Path, *, shared: bool = False) -> Settings:
    server = ServerSettings(data_dir=tmp_path / "data", share_data_dir=shared)
    server.data_dir.mkdir(exist_ok=True)
    store = PluginSection.model_validate({"plugin": "memory", "directory": str(tmp_path / "memory")})
    return Settings(server=server, store=store)


async def test_who_opens_it_while_its_server_runs_finds_the_same_rows(tmp_path: Path) -> None:
    settings, plugins = in_memory(tmp_path), Plugins.load()
    with hold_store(settings, plugins):
        ours, theirs = make_store(settings, plugins), make_store(settings, plugins)
        for each in (ours, theirs):
            await each.open()
        await ours.create_session(a_session(), idempotency_key=None)
        assert len(await theirs.list_sessions(None, limit=9, offset=0)) == 1
        for each in (ours, theirs):
            await each.close()
    assert list((tmp_path / "memory").iterdir()) == []
    with pytest.raises(ConfigError, match="no server runs on"):
        make_store(settings, plugins)


@pytest.mark.parametrize("kept", ["tinsmith.db", "recovery/x", "snapshots/x"])
def test_it_is_refused_where_a_durable_store_keeps_something(tmp_path: Path, kept: str) -> None:
    settings = in_memory(tmp_path)
    (settings.data_dir.root / kept).mkdir(parents=True)
    with pytest.raises(ConfigError, match=kept.partition("/")[0]):
        look_at_store(settings, Plugins.load())


def test_a_durable_server_ends_the_permission_to_remove_what_it_finds(tmp_path: Path) -> None:
    settings, plugins = in_memory(tmp_path), Plugins.load()
    with hold_store(settings, plugins):
        (settings.data_dir.root / "recovery" / "x").mkdir(parents=True)
    look_at_store(settings, plugins)
    with hold_store(settings.model_copy(update={"store": PluginSection(plugin="sql")}), plugins):
        pass
    with pytest.raises(ConfigError, match="recovery"):
        look_at_store(settings, plugins)


def test_several_servers_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot share a store in memory"):
        look_at_store(in_memory(tmp_path, shared=True), Plugins.load())


def test_a_directory_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "memory").write_text("a file")
    settings, plugins = in_memory(tmp_path), Plugins.load()
    with pytest.raises(ConfigError, match=r"store\.directory: .*memory"):
        hold_store(settings, plugins).__enter__()
