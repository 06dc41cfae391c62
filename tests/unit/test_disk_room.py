"""Who may still write how much: the rules, and an engine that keeps to them."""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from tinsmith import operations as ops
from tinsmith.backend import BackendContext
from tinsmith.builtin.toy_backend import ToyBackend, ToyConfig
from tinsmith.engine import context
from tinsmith.errors import CapacityError
from tinsmith.losses import BUILTIN_LOSSES
from tinsmith.server.limits.disk_quota import DiskQuota
from tinsmith.settings import QuotaSettings, RecoverySettings
from tinsmith.sql_store.config import SqlStoreConfig
from tinsmith.sql_store.store import SqlStore
from tinsmith.store import KeptBytes, RequestStore, StoreContext
from tinsmith.store.disk_room import (
    DiskSpace,
    allowed_bytes,
    readable,
    reserve_bytes,
    space_at,
    why_in_reserve,
    why_over_share,
)
from tinsmith.testing.engine_driver import WAIT_S, EngineDriver, make_engine

GIB = 1 << 30
LARGE = DiskSpace(total_bytes=1000 * GIB, free_bytes=101 * GIB)
MODEL = "s1:train:0"


def test_the_reserve_is_a_part_of_a_small_disk_only() -> None:
    assert reserve_bytes(QuotaSettings(), LARGE) == GIB
    assert reserve_bytes(QuotaSettings(), DiskSpace(total_bytes=10 * GIB, free_bytes=0)) == GIB // 2
    assert reserve_bytes(QuotaSettings(disk_reserve_bytes=5), LARGE) == 5


def test_a_share_leaves_room_for_others_whatever_one_keeps() -> None:
    """Of what is left, everybody may take the same part, so nobody is ever without any."""
    quotas = QuotaSettings(disk_share=0.5)
    assert allowed_bytes(quotas, KeptBytes(tenant="ann"), LARGE) == 50 * GIB
    full = KeptBytes(tenant="ann", log=20 * GIB, checkpoints=30 * GIB)
    after = DiskSpace(total_bytes=1000 * GIB, free_bytes=51 * GIB)
    assert allowed_bytes(quotas, full, after) == 50 * GIB  # what one has written is not taken from what it may
    assert why_over_share(quotas, full, after, more=0) is None
    assert why_over_share(quotas, full, after, more=1) is not None
    assert allowed_bytes(quotas, KeptBytes(tenant="bob"), after) == 25 * GIB


def test_by_default_little_of_a_large_disk_is_left_for_others() -> None:
    """Whoever kept much before there was a limit, or is alone, goes on."""
    kept = KeptBytes(tenant="ann", checkpoints=800 * GIB)
    assert allowed_bytes(QuotaSettings(), kept, LARGE) == (800 + 100 - 4) * GIB
    small = DiskSpace(total_bytes=100 * GIB, free_bytes=11 * GIB)
    assert allowed_bytes(QuotaSettings(), KeptBytes(tenant="bob"), small) == 8 * GIB


def test_a_tenant_can_have_limits_of_its_own() -> None:
    quotas = QuotaSettings.model_validate({"tenants": {"ann": {"disk_bytes": 100}, "bob": {"disk_share": 1.0}}})
    why = why_over_share(quotas, KeptBytes(tenant="ann", log=60, checkpoints=40), LARGE, more=1)
    assert why is not None
    for said in ("you keep 100 bytes", "log and results 60 bytes", "checkpoints 40 bytes", "(quotas.disk_bytes)"):
        assert said in why
    assert allowed_bytes(quotas, KeptBytes(tenant="bob"), LARGE) == 100 * GIB


def test_a_refusal_for_the_reserve_names_it() -> None:
    assert why_in_reserve(QuotaSettings(), LARGE, more=100 * GIB) is None
    why = why_in_reserve(QuotaSettings(), LARGE, more=100 * GIB + 1)
    assert why is not None
    for said in ("101.0 GiB free", "the last 1.0 GiB", "(quotas.disk_reserve_bytes)"):
        assert said in why
    assert why_in_reserve(QuotaSettings(), LARGE, more=100 * GIB + 1, share=0.5) is None


@pytest.mark.parametrize(("size", "text"), [(1023, "1023 bytes"), (1536, "1.5 KiB"), (3 << 40, "3.0 TiB")])
def test_sizes_are_readable(size: int, text: str) -> None:
    assert readable(size) == text


def test_a_directory_that_is_not_there_yet_has_the_space_of_its_parent(tmp_path: Path) -> None:
    assert space_at(tmp_path / "a" / "b").total_bytes == space_at(tmp_path).total_bytes > 0


# A server -----------------------------------------------------------------------------------------------------------


async def test_requests_that_come_together_at_the_start_are_all_admitted(tmp_path: Path) -> None:
    """All but the first find that the space is being read, and must not take that for a full disk."""
    store = SqlStore(SqlStoreConfig(synchronous="off"), StoreContext(data_dir=tmp_path))
    await store.open()
    try:
        quota = DiskQuota(store, QuotaSettings(), lambda: LARGE, time.monotonic)
        await asyncio.gather(*(quota.admit("ann", 1) for _ in range(5)))
    finally:
        await store.close()


async def test_a_save_fails_if_there_is_no_room_for_its_request_either() -> None:
    """With a 429, it would be sent again until its tenant deletes something."""

    class Store:
        async def kept_bytes(self, tenant: str) -> list[KeptBytes]:
            return [KeptBytes(tenant=tenant, checkpoints=199_900)]

    settings = QuotaSettings(disk_bytes=200_000)
    quota = DiskQuota(cast("RequestStore", Store()), settings, lambda: LARGE, time.monotonic)
    with pytest.raises(CapacityError):
        await quota.admit("ann", 170)
    why = await quota.why_no_save("ann")
    assert why is not None
    assert "quotas.disk_bytes" in str(why)


# An engine -----------------------------------------------------------------------------------------------------------


@dataclass
class Disk:
    """What the engine is told of the disk."""

    free_bytes: int = 100 * GIB

    def space(self, _directory: Path) -> DiskSpace:
        return DiskSpace(total_bytes=1000 * GIB, free_bytes=self.free_bytes)


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Disk:
    disk = Disk()
    monkeypatch.setattr(context, "space_at", disk.space)
    return disk


@asynccontextmanager
async def serving(data_dir: Path, quotas: QuotaSettings, **options: Any) -> AsyncIterator[EngineDriver]:
    store = SqlStore(SqlStoreConfig(synchronous="off"), StoreContext(data_dir=data_dir))
    await store.open()
    losses = {loss.name: loss for loss in BUILTIN_LOSSES}
    context = BackendContext(model_name="toy", model_path=None, cache_dir=data_dir, losses=losses)
    backend = ToyBackend(ToyConfig(), context)
    engine = await make_engine(store, backend, data_dir, sampler=backend, quotas=quotas, **options)
    await engine.recover("killed", lambda _what, _share: None)
    running = asyncio.create_task(engine.run())
    client = EngineDriver(store, "toy")
    await client.open_session()
    await client.result(await client.create_model())
    try:
        yield client
    finally:
        engine.stop()
        await asyncio.wait_for(running, WAIT_S)
        await store.close()


def files_below(directory: Path) -> list[Path]:
    return [path for path in directory.rglob("*") if path.is_file()]


def saves(client: EngineDriver) -> list[ops.Operation]:
    return [
        ops.SaveState(model_id=MODEL, path=client.path("a")),
        ops.SaveForSampler(model_id=MODEL, path=client.path("b", "sampler_weights")),
        ops.SaveForSampler(model_id=MODEL, sampling_session_id="s1:sample:0"),
        ops.ExportAdapter(model_id=MODEL, path=client.path("c", "external_weights")),
    ]


async def step(client: EngineDriver) -> None:
    result = await client.run(ops.OptimStep(model_id=MODEL, adam=ops.AdamParams()))
    assert isinstance(result, ops.OptimStepOutput), result


def use_reserve(disk: Disk) -> None:
    disk.free_bytes = GIB


def nothing(disk: Disk) -> None:
    del disk


@pytest.mark.parametrize(
    ("fill", "quotas", "setting"),
    [(use_reserve, {}, "quotas.disk_reserve_bytes"), (nothing, {"disk_bytes": 1000}, "quotas.disk_bytes")],
    ids=["reserve", "share"],
)
async def test_what_has_no_room_is_refused_whole_and_training_goes_on(
    tmp_path: Path,
    disk: Disk,
    caplog: pytest.LogCaptureFixture,
    fill: Callable[[Disk], None],
    quotas: dict[str, int],
    setting: str,
) -> None:
    every_step = RecoverySettings(point_every_operations=1)
    async with serving(tmp_path, QuotaSettings(**quotas), recovery=every_step) as client:
        fill(disk)
        for operation in saves(client):
            failed = await client.run(operation)
            assert isinstance(failed, ops.Failed), operation
            assert failed.category == "user"
            assert setting in failed.message
        for _ in range(3):
            await step(client)
        assert files_below(tmp_path / "checkpoints") == []
        assert files_below(tmp_path / "recovery") == []
        assert files_below(tmp_path / "snapshots") == []
    skipped = [each for each in caplog.records if "no recovery point of" in each.getMessage()]
    assert skipped
    assert all(each.levelno == logging.WARNING and setting in each.getMessage() for each in skipped)


async def test_a_recovery_point_needs_no_more_room_than_the_one_that_it_replaces(tmp_path: Path, disk: Disk) -> None:
    every_step = RecoverySettings(point_every_operations=1)
    async with serving(tmp_path, QuotaSettings(disk_share=1.0), recovery=every_step) as client:

        async def newest() -> int:
            """Step until there are as many as are kept, and return which operation the newest one follows."""
            while len(found := await client.store.list_recovery_points(MODEL)) < every_step.keep_points:
                await step(client)
            return found[0].seq_id

        full = await newest()
        disk.free_bytes = GIB + 1000  # above the reserve, and less than a state takes
        for _ in range(100):
            await step(client)
            if await newest() > full + 1:  # not one that had begun before
                break
        else:
            pytest.fail("no recovery point replaced another")


async def test_a_load_needs_room_for_its_recovery_point(tmp_path: Path, disk: Disk) -> None:
    async with serving(tmp_path, QuotaSettings()) as client:
        saved = await client.run(ops.SaveState(model_id=MODEL, path=client.path("a")))
        assert isinstance(saved, ops.WeightsSaved)
        use_reserve(disk)
        failed = await client.run(ops.LoadState(model_id=MODEL, path=client.path("a"), load_optimizer=True))
        assert isinstance(failed, ops.Failed)
        assert "quotas.disk_reserve_bytes" in failed.message
        await step(client)


async def test_a_snapshot_that_the_disk_cannot_take_stays_in_memory(tmp_path: Path, disk: Disk) -> None:
    """Whoever samples from another one would otherwise fail for it."""
    async with serving(tmp_path, QuotaSettings(), resident_snapshots=2) as client:
        names = [f"s1:sample:{number}" for number in range(4)]
        for name in names:
            saved = await client.run(ops.SaveForSampler(model_id=MODEL, sampling_session_id=name))
            assert isinstance(saved, ops.WeightsSaved)
        use_reserve(disk)
        for name in names:  # those that come back from the disk take the places of those that cannot go there
            drawn = await client.run(
                ops.Sample(
                    sampling_session_id=name,
                    snapshot_id=name,
                    prompt_P=np.array([1, 2, 3], np.int32),
                    params=ops.SamplingParams(max_tokens=3, seed=1),
                )
            )
            assert isinstance(drawn, ops.SampleOutput), drawn
