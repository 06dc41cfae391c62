"""The sampling snapshots of one engine: which are in the sampler, which have gone to disk, and bringing those back."""

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import TypeVar

from tinsmith.backend import ModelState, SamplingBackend, Snapshot
from tinsmith.checkpoints.format import delete_checkpoint, read_snapshot, write_checkpoint
from tinsmith.checkpoints.tinker_path import TinkerPath
from tinsmith.errors import ServerError
from tinsmith.failpoints import durable_boundary

T = TypeVar("T")


@dataclass(slots=True)
class _Held:
    """One snapshot. `snapshot` is None while it is on disk only; then it can be read from `directory` of `root`."""

    root: Path
    directory: str
    on_disk: bool
    model_id: str | None = None
    snapshot: Snapshot | None = None
    users: int = 0
    loading: asyncio.Lock = field(default_factory=asyncio.Lock)


class Snapshots:
    """Keeps at most `max_resident` in the sampler, those last used; a snapshot that is being sampled from stays.

    Ephemeral snapshots live until their model is unloaded, over restarts of the engine too; persisted ones (their id
    is their tinker:// path) are read from their checkpoint whenever they are asked for.
    """

    def __init__(
        self, sampler: SamplingBackend, *, checkpoint_root: Path, spill_root: Path, max_resident: int, epoch: int
    ) -> None:
        self._sampler = sampler
        self._epoch = epoch
        self._checkpoint_root = checkpoint_root
        self._spill_root = spill_root
        self._max_resident = max_resident
        self._held: dict[str, _Held] = {}  # least recently used first
        self._writing = asyncio.Lock()  # the spill root allows one writer at a time

    async def adopt(self, models: Mapping[str, str]) -> None:
        """Take over what an earlier engine wrote of live ephemeral snapshots (id to model_id); remove the others."""
        for name in await asyncio.to_thread(self._on_disk):
            if name in models:
                self._held[name] = _Held(root=self._spill_root, directory=name, on_disk=True, model_id=models[name])
            else:
                await asyncio.to_thread(delete_checkpoint, self._spill_root, name)

    def _on_disk(self) -> list[str]:
        if not self._spill_root.is_dir():
            return []
        return [path.name for path in self._spill_root.iterdir() if path.is_dir() and not path.name.startswith(".")]

    def holds(self, snapshot_id: str) -> bool:
        return snapshot_id in self._held

    async def persist(self, model_id: str, base_model: str) -> None:
        """Write the model's ephemeral snapshots to disk, so that they outlive the engine without a replay."""
        for snapshot_id, held in [each for each in self._held.items() if each[1].model_id == model_id]:
            async with held.loading:
                if not held.on_disk and held.snapshot is not None:
                    await self._write_out(held, held.snapshot, base_model)
                    if self._held.get(snapshot_id) is not held:  # its model was unloaded meanwhile
                        await asyncio.to_thread(delete_checkpoint, held.root, held.directory)

    async def add(self, snapshot: Snapshot, *, model_id: str, persisted: bool, base_model: str) -> None:
        """Load a fresh snapshot. A persisted one must have been written already."""
        held = self._entry(snapshot.snapshot_id) if persisted else self._ephemeral(snapshot.snapshot_id)
        held.model_id = model_id
        async with held.loading:
            await self._sampler.drop_snapshot(snapshot.snapshot_id)  # of a deleted checkpoint of the same name
            await self._sampler.load_snapshot(snapshot)
            held.snapshot = snapshot
        self._held[snapshot.snapshot_id] = held
        await self._make_room(base_model)

    @asynccontextmanager
    async def use(self, snapshot_id: str | None, *, base_model: str) -> AsyncIterator[None]:
        """Have it in the sampler while the block runs; None is the base model.

        Raise NotFoundError or ServerError where it is gone.
        """
        if snapshot_id is None:
            yield
            return
        held = self._held.pop(snapshot_id, None) or self._entry(snapshot_id)
        self._held[snapshot_id] = held
        held.users += 1
        try:
            await self._load(snapshot_id, held)
            await self._make_room(base_model)
            yield
        except BaseException:
            if held.snapshot is None and held.users == 1:
                self._held.pop(snapshot_id, None)  # there is none
            raise
        finally:
            held.users -= 1

    async def discard(self, snapshot_id: str) -> None:
        """Forget a snapshot that nobody has been told of. A persisted one stays on disk."""
        held = self._held.pop(snapshot_id, None)
        await self._sampler.drop_snapshot(snapshot_id)
        if held is not None and held.on_disk and held.root == self._spill_root:
            await asyncio.to_thread(delete_checkpoint, held.root, held.directory)

    async def drop_model(self, model_id: str) -> None:
        """Forget the ephemeral snapshots of a model; samples that run from them end first."""
        for snapshot_id, held in list(self._held.items()):
            if held.model_id == model_id and held.root == self._spill_root:
                del self._held[snapshot_id]
                await self._sampler.drop_snapshot(snapshot_id)
                if held.on_disk:
                    await asyncio.to_thread(delete_checkpoint, held.root, held.directory)

    def _entry(self, snapshot_id: str) -> _Held:
        if not snapshot_id.startswith("tinker://"):
            msg = (
                f"sampling snapshot {snapshot_id!r} is gone: its session ended, or its model was lost; save the "
                "weights for sampling again"
            )
            raise ServerError(msg)
        return _Held(root=self._checkpoint_root, directory=TinkerPath.parse(snapshot_id).directory, on_disk=True)

    def _ephemeral(self, snapshot_id: str) -> _Held:
        return _Held(root=self._spill_root, directory=snapshot_id, on_disk=False)

    async def _load(self, snapshot_id: str, held: _Held) -> None:
        async with held.loading:
            if held.snapshot is None:
                snapshot = await asyncio.to_thread(read_snapshot, held.root, held.directory, snapshot_id)
                await self._sampler.load_snapshot(snapshot)
                held.snapshot = snapshot

    async def _make_room(self, base_model: str) -> None:
        resident = [(name, held) for name, held in self._held.items() if held.snapshot is not None]
        excess = len(resident) - self._max_resident
        for name, held in resident:
            if excess <= 0:
                return
            if held.users == 0 and not held.loading.locked():
                await self._spill(name, held, base_model)
                excess -= 1

    async def _spill(self, snapshot_id: str, held: _Held, base_model: str) -> None:
        async with held.loading:
            snapshot = held.snapshot
            if snapshot is None or held.users:
                return
            if not held.on_disk:
                await self._write_out(held, snapshot, base_model)
            if held.users == 0:
                held.snapshot = None
                await self._sampler.drop_snapshot(snapshot_id)

    @durable_boundary("snapshot.persist")
    async def _write_out(self, held: _Held, snapshot: Snapshot, base_model: str) -> None:
        async with self._writing:
            await asyncio.to_thread(self._write, held, snapshot, base_model)
        held.on_disk = True

    def _write(self, held: _Held, snapshot: Snapshot, base_model: str) -> None:
        write_checkpoint(
            held.root,
            held.directory,
            kind="sampler",
            state=ModelState(lora=snapshot.lora, weights=snapshot.adapter_weights()),
            base_model=base_model,
            user_metadata={},
            created_at=datetime.now(UTC),
            overwrite=True,
            epoch=self._epoch,
        )
