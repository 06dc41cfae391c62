"""Each version of a checkpoint has files of its own: whoever deletes or writes late never meets a newer one."""

import asyncio
import os
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import httpx
import pytest

from tinsmith import operations as ops
from tinsmith.backend import BackendContext
from tinsmith.builtin.toy_backend import ToyBackend, ToyConfig
from tinsmith.checkpoints import atomic_directory
from tinsmith.checkpoints import saved as checkpoints
from tinsmith.checkpoints.atomic_directory import sweep
from tinsmith.checkpoints.tinker_path import versions_on_disk
from tinsmith.engine.checkpoint_files import CheckpointReader
from tinsmith.engine.engine import Engine
from tinsmith.errors import LeaseLostError, ServerError
from tinsmith.losses import BUILTIN_LOSSES
from tinsmith.plugins.loading import Plugins
from tinsmith.processes.housekeeping import Housekeeping, remove_orphans
from tinsmith.server.app import create_app
from tinsmith.settings import ApiKey, ServerSettings, Settings
from tinsmith.sql_store.config import SqlStoreConfig
from tinsmith.sql_store.store import SqlStore
from tinsmith.steady_clock import SteadyClock
from tinsmith.store import CheckpointRecord, StoreContext
from tinsmith.testing.engine_driver import WAIT_S, EngineDriver, make_engine, take_over
from tinsmith.testing.harness import TOY
from tinsmith.testing.store_records import a_checkpoint, claim_records

MODEL = "s1:train:0"
STEP = ops.OptimStep(model_id=MODEL, adam=ops.AdamParams(weight_decay=0.5))


@dataclass
class Setup:
    store: SqlStore
    data_dir: Path
    client: EngineDriver

    @property
    def root(self) -> Path:
        return self.data_dir / "checkpoints"

    async def make_engine(self) -> Engine:
        context = BackendContext(
            model_name="toy",
            model_path=None,
            cache_dir=self.data_dir,
            losses={loss.name: loss for loss in BUILTIN_LOSSES},
        )
        backend = ToyBackend(ToyConfig(), context)
        engine = await make_engine(self.store, backend, self.data_dir, sampler=backend)
        await engine.recover("killed", lambda _what, _share: None)
        return engine

    @asynccontextmanager
    async def engine(self) -> AsyncIterator[Engine]:
        engine = await self.make_engine()
        task = asyncio.create_task(engine.run())
        try:
            yield engine
        finally:
            engine.stop()
            await asyncio.wait_for(task, WAIT_S)

    def a_save(self, **options: Any) -> ops.SaveState:
        return ops.SaveState(model_id=MODEL, path=self.client.path("x"), overwrite=True, **options)

    async def save(self, **options: Any) -> CheckpointRecord:
        saved = await self.client.run(self.a_save(**options))
        assert isinstance(saved, ops.WeightsSaved), saved
        return await self.store.get_checkpoint(self.client.path("x"))

    async def next_save(self) -> CheckpointRecord:
        await self.client.run(STEP)
        return await self.save()

    def on_disk(self) -> set[str]:
        return {str(found.parent.relative_to(self.root)) for found in self.root.rglob("tinsmith.json")}

    async def assert_intact(self, record: CheckpointRecord) -> None:
        """The save was acknowledged, and nobody deleted it: it is there, with its own bytes, and nothing else is."""
        assert await self.store.get_checkpoint(record.path) == record
        read = await asyncio.to_thread(checkpoints.read_checkpoint, self.root, record.directory)
        assert (read.created_at, read.state.step) == (record.created_at, record.step)
        assert self.on_disk() == {record.directory}

    def housekeeping(self, now: datetime) -> Housekeeping:
        settings = ServerSettings(session_timeout_s=60, result_retention_s=1e6)
        return Housekeeping(settings, self.store, self.root, clock=SteadyClock(lambda: now, lambda: 0.0))


@pytest.fixture
async def setup(tmp_path: Path) -> AsyncIterator[Setup]:
    store = SqlStore(SqlStoreConfig(synchronous="off", safety_poll_s=600.0), StoreContext(data_dir=tmp_path))
    await store.open()
    client = EngineDriver(store, "toy")
    await client.open_session()
    yield Setup(store, tmp_path, client)
    await store.close()


def after(call: Callable[..., Awaitable[Any]], what: Callable[[], Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
    """Return the call, with something that happens right after it for the first time."""
    once = [what]

    async def changed(*args: Any, **kwargs: Any) -> Any:
        result = await call(*args, **kwargs)
        if once:
            await once.pop()()
        return result

    return changed


async def test_a_save_replaces_the_version_before_and_its_files(setup: Setup) -> None:
    async with setup.engine():
        await setup.client.create_model()
        first = await setup.save()
        second = await setup.next_save()
        assert first.directory != second.directory
    await setup.assert_intact(second)


async def test_expiry_spares_a_save_that_came_after_it_looked(setup: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    async with setup.engine():
        await setup.client.create_model()
        await setup.save(ttl_seconds=3600)
        saved: list[CheckpointRecord] = []

        async def save_again() -> None:
            saved.append(await setup.next_save())

        monkeypatch.setattr(setup.store, "expired_checkpoints", after(setup.store.expired_checkpoints, save_again))
        await setup.housekeeping(datetime.now(UTC) + timedelta(hours=2)).round()
    await setup.assert_intact(saved[0])


async def test_expiry_spares_what_was_given_more_time_after_it_looked(
    setup: Setup, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with setup.engine():
        await setup.client.create_model()
        record = await setup.save(ttl_seconds=3600)

        async def keep() -> None:
            await setup.store.update_checkpoint(record.path, lambda it: replace(it, expires_at=None))

        monkeypatch.setattr(setup.store, "expired_checkpoints", after(setup.store.expired_checkpoints, keep))
        await setup.housekeeping(datetime.now(UTC) + timedelta(hours=2)).round()
    await setup.assert_intact(replace(record, expires_at=None))


async def test_a_deletion_on_a_slow_disk_spares_a_later_save(setup: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    """The record is deleted, the name is used again, and only then are the files deleted."""
    begun, may_go_on, delete = threading.Event(), threading.Event(), checkpoints.delete_checkpoint

    def slow(root: Path, directory: str) -> None:
        begun.set()
        assert may_go_on.wait(WAIT_S)
        delete(root, directory)

    keys = (ApiKey.model_validate({"key": "tml-ann", "tenant": "ann"}),)
    settings = Settings(server=ServerSettings(data_dir=setup.data_dir, api_keys=keys), models=(TOY,))
    app = await create_app(settings, store=setup.store, plugins=Plugins.load())
    headers = {"X-API-Key": "tml-ann"}
    async with (
        setup.engine(),
        httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://test", headers=headers) as http,
    ):
        await setup.client.create_model()
        await setup.save()
        monkeypatch.setattr(checkpoints, "delete_checkpoint", slow)
        url = f"/api/v1/training_runs/{MODEL}/checkpoints/weights/x"
        deleting = asyncio.create_task(http.delete(url))
        assert await asyncio.to_thread(begun.wait, WAIT_S)
        saved = await setup.next_save()
        may_go_on.set()
        assert (await deleting).status_code == 200
    await setup.assert_intact(saved)


async def test_a_writer_that_was_paused_during_a_takeover_touches_only_what_is_its_own(
    setup: Setup, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has written its files, and wakes up when another engine has saved the same checkpoint."""
    paused, may_go_on, woken = threading.Event(), threading.Event(), threading.Event()
    put, write = atomic_directory.put, atomic_directory.write

    def put_later(target: Path, fresh: Path) -> None:
        paused.set()
        assert may_go_on.wait(WAIT_S)
        put(target, fresh)

    def write_and_tell(*args: Any, **options: Any) -> None:
        try:
            write(*args, **options)
        finally:
            woken.set()

    first = asyncio.create_task((await setup.make_engine()).run())
    await setup.client.create_model()
    await setup.client.run(STEP)
    monkeypatch.setattr(atomic_directory, "put", put_later)
    monkeypatch.setattr(atomic_directory, "write", write_and_tell)
    waiting = await setup.client.submit(setup.a_save())
    assert await asyncio.to_thread(paused.wait, WAIT_S)
    monkeypatch.setattr(atomic_directory, "put", put)
    monkeypatch.setattr(atomic_directory, "write", write)
    async with setup.engine():
        assert isinstance(await setup.client.result(waiting), ops.WeightsSaved)
        record = await setup.store.get_checkpoint(setup.client.path("x"))
        may_go_on.set()
        assert await asyncio.to_thread(woken.wait, WAIT_S)
        with pytest.raises(LeaseLostError):
            await asyncio.wait_for(first, WAIT_S)
        await remove_orphans(setup.store, setup.root, older_than_s=0)
        await setup.assert_intact(record)
        saved = await setup.client.run(ops.LoadState(model_id=MODEL, path=record.path, load_optimizer=True))
        assert isinstance(saved, ops.WeightsLoaded)


async def test_orphans_are_removed_and_nothing_else(setup: Setup) -> None:
    def orphan(directory: str) -> str:
        (setup.root / directory).mkdir(parents=True)
        return directory

    async with setup.engine():
        await setup.client.create_model()
        record = await setup.save()
    strange = [orphan(each) for each in ("s9:train:0/weights/x~01", "not/a-checkpoint/x~0", f"{MODEL}/weights/y")]
    left = [orphan(each) for each in (f"{MODEL}/sampler_weights/never~01", f"{MODEL}/weights/x~01")]
    assert await remove_orphans(setup.store, setup.root) == [], "they are too young"
    assert sorted(await remove_orphans(setup.store, setup.root, older_than_s=0)) == left
    await setup.store.delete_checkpoint(record.path)
    assert await remove_orphans(setup.store, setup.root, older_than_s=0) == [record.directory]

    orphan(left[0])
    await setup.client.submit(setup.a_save())
    lease = await take_over(setup.store, "toy")
    (claimed,) = await claim_records(setup.store, lease, 1)
    assert claimed.kind == "save_state"
    assert await remove_orphans(setup.store, setup.root, older_than_s=0) == [], "an engine may be writing it"
    assert all((setup.root / each).is_dir() for each in strange), "this store knows nothing of them"


class Counted:
    """A store that counts what it is asked."""

    def __init__(self, store: SqlStore) -> None:
        self._store = store
        self.asked = 0

    def __getattr__(self, name: str) -> Any:
        self.asked += 1
        return getattr(self._store, name)


async def test_many_checkpoints_are_compared_with_few_reads(setup: Setup) -> None:
    """Housekeeping does nothing else meanwhile: no session expires."""
    asked = []
    for number in range(40):
        record = a_checkpoint(f"c{number}", directory=f"{MODEL}/weights/c{number}~01")
        (setup.root / record.directory).mkdir(parents=True)
        await setup.store.add_checkpoint(record)
        counted = Counted(setup.store)
        assert await remove_orphans(counted, setup.root, older_than_s=0) == []  # type: ignore[arg-type]
        asked.append(counted.asked)
    assert asked[-1] == asked[0]


async def test_a_replay_loads_the_version_that_was_loaded_or_none(setup: Setup) -> None:
    """The time does not tell: a version may have been saved while the load ran."""
    reader = CheckpointReader(setup.store, setup.root, base_model="toy")
    async with setup.engine():
        await setup.client.create_model()
        saved = await setup.save()
        await setup.client.run(ops.LoadState(model_id=MODEL, path=saved.path, load_optimizer=True))
        (*_, load) = await setup.store.replayable(MODEL, after_seq_id=-1, limit=9)
        assert load.kind == "load_state"
        await reader.state_at_replay(saved.path, load_optimizer=True, of=load)
        await setup.next_save()
        ended_later = replace(load, finished_at=datetime.now(UTC) + timedelta(hours=1))
        with pytest.raises(ServerError, match="has been overwritten since"):
            await reader.state_at_replay(saved.path, load_optimizer=True, of=ended_later)


def test_maintenance_passes_over_what_is_removed_meanwhile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A deletion or a save beside it removes directories that it has just seen."""
    weights = tmp_path / "m" / "weights"
    for name in ("a~1", ".a~0.deleted-x", ".b~0.deleted-y"):
        (weights / name).mkdir(parents=True)
    (tmp_path / "ended" / "weights").mkdir(parents=True)
    gone, own = {str(weights / ".a~0.deleted-x"), str(tmp_path / "ended")}, os.scandir

    def scandir(path: str | Path) -> Any:
        if str(path) in gone:
            raise FileNotFoundError(path)
        return own(path)

    monkeypatch.setattr(os, "scandir", scandir)
    assert list(versions_on_disk(tmp_path, older_than_s=-1)) == ["m/weights/a~1"]
    sweep(tmp_path, older_than_s=-1)
    assert not (weights / ".b~0.deleted-y").exists()
