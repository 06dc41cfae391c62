"""Store plugins built before recovery points and sampling sessions had their names still import and run."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from pydantic import Field

import tinsmith
from tinsmith.sql_store.config import SqlStoreConfig
from tinsmith.sql_store.store import SqlStore
from tinsmith.store import (
    LiveModel,
    RequestStore,
    SamplerCreated,
    SamplerRecord,
    SnapshotRecord,
    SnapshotTaken,
    StoreContext,
)
from tinsmith.testing.store_records import BASE, NOW, a_model, a_recovery_point, a_run, an_operation, lease_of


class SkeletonConfig(SqlStoreConfig):
    directory: Path | None = Field(None, description="where the database lives; default: the data directory")


class SkeletonStore(SqlStore):
    """As `tinsmith new-plugin store` generated it."""

    def __init__(self, config: SkeletonConfig, context: tinsmith.StoreContext) -> None:
        self._directory = config.directory or context.data_dir
        super().__init__(config, tinsmith.StoreContext(data_dir=self._directory))

    async def open(self) -> None:
        self._directory.mkdir(parents=True, exist_ok=True)
        await super().open()


class OldStore(SkeletonStore):
    """Overrides every renamed method under its old name."""

    def __init__(self, config: SkeletonConfig, context: tinsmith.StoreContext) -> None:
        super().__init__(config, context)
        self.called: list[str] = []

    async def create_sampler(self, sampler: SamplerRecord) -> SamplerRecord:
        self.called.append("create_sampler")
        return await super().create_sampler(sampler)  # type: ignore[misc]  # the old names are for plugins that exist

    async def get_sampler(self, sampling_session_id: str) -> SamplerRecord:
        self.called.append("get_sampler")
        return await super().get_sampler(sampling_session_id)  # type: ignore[misc]  # as above

    async def list_samplers(self, session_id: str) -> list[SamplerRecord]:
        self.called.append("list_samplers")
        return await super().list_samplers(session_id)  # type: ignore[misc]  # as above

    async def add_snapshot(self, lease: tinsmith.store.Lease, record: SnapshotRecord, *, keep: int) -> None:
        self.called.append("add_snapshot")
        await super().add_snapshot(lease, record, keep=keep)  # type: ignore[misc]  # as above

    async def list_snapshots(self, model_id: str) -> list[SnapshotRecord]:
        self.called.append("list_snapshots")
        return await super().list_snapshots(model_id)  # type: ignore[misc]  # as above

    async def drop_snapshot(self, lease: tinsmith.store.Lease, model_id: str, seq_id: int) -> None:
        self.called.append("drop_snapshot")
        await super().drop_snapshot(lease, model_id, seq_id)  # type: ignore[misc]  # as above


def test_the_old_names_are_the_new_classes() -> None:
    classes = (SamplerCreated, SamplerRecord, SnapshotRecord, SnapshotTaken)
    assert [each.__name__ for each in classes] == [
        "SamplingSessionCreated",
        "SamplingSessionRecord",
        "RecoveryPointRecord",
        "RecoveryPointTaken",
    ]


def test_the_old_fields_are_the_new_ones() -> None:
    operation: Any = an_operation(seq_id=1)
    assert operation.stream == operation.subject_id
    moved = replace(operation, stream="another model")  # calls the constructor with the old name, as an old store does
    assert (moved.stream, moved.subject_id, moved.seq_id) == ("another model", "another model", 1)
    live: Any = LiveModel
    model = live(run=a_run(), pruned_seq_id=0, snapshots=(), ephemeral=())
    assert model.snapshots == model.recovery_points == ()
    assert "stream" not in repr(operation)


async def test_a_store_that_overrides_old_names_is_called_by_the_new_ones(tmp_path: Path) -> None:
    store = OldStore(SkeletonConfig(synchronous="off", directory=tmp_path / "own"), StoreContext(data_dir=tmp_path))
    await store.open()
    assert (tmp_path / "own" / "tinsmith.db").exists()
    await a_model(store)
    await store.submit(an_operation(seq_id=1))

    sampler = SamplerRecord(
        sampling_session_id="s1:sample:0", session_id="s1", tenant="ann", base_model=BASE, created_at=NOW
    )
    assert await store.create_sampling_session(sampler) == sampler
    assert await store.get_sampling_session("s1:sample:0") == sampler
    assert await store.list_sampling_sessions("s1") == [sampler]
    lease, point = await lease_of(store), a_recovery_point(0)
    await store.add_recovery_point(lease, point, keep=2)
    assert await store.list_recovery_points(a_run().model_id) == [point]
    await store.drop_recovery_point(lease, a_run().model_id, 0)
    assert store.called == [
        "create_sampler",
        "get_sampler",
        "list_samplers",
        "add_snapshot",
        "list_snapshots",
        "drop_snapshot",
    ]
    assert await store.list_snapshots(a_run().model_id) == []
    await store.close()


def test_old_and_new_names_implement_the_same_abstract_methods() -> None:
    class Half(RequestStore):
        async def get_sampler(self, sampling_session_id: str) -> SamplerRecord:
            raise NotImplementedError

        async def list_recovery_points(self, model_id: str) -> list[SnapshotRecord]:
            raise NotImplementedError

    missing = Half.__abstractmethods__
    assert missing < RequestStore.__abstractmethods__
    assert RequestStore.__abstractmethods__ - missing == {"get_sampling_session", "list_recovery_points"}
    with pytest.raises(TypeError, match="create_sampling_session"):
        Half()  # type: ignore[abstract]
