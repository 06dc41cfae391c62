"""The snapshots of one engine: which are in the sampler, which only on disk, and loading those again."""

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

from tinsmith.backend import ModelState, SamplingBackend, Snapshot
from tinsmith.checkpoints.format import delete_checkpoint, read_snapshot, write_checkpoint
from tinsmith.checkpoints.tinker_path import TinkerPath
from tinsmith.errors import ServerError, UnsupportedError, UserError
from tinsmith.failpoints import durable_boundary
from tinsmith.operations import LoraConfig
from tinsmith.store import Lease


@dataclass(slots=True)
class _Held:
    """One snapshot. `snapshot` is None while it is only on disk, in `directory` of `root`."""

    root: Path
    directory: str
    on_disk: bool
    model_id: str | None = None
    snapshot: Snapshot | None = None
    users: int = 0
    loading: asyncio.Lock = field(default_factory=asyncio.Lock)


class Snapshots:
    """Keeps the `max_resident` snapshots that were used last in the sampler, and those that are being sampled from.

    Ephemeral snapshots live until their model is unloaded, and survive restarts of the engine. Persisted ones, whose
    id is their tinker:// path, are read from their checkpoint when they are needed.
    """

    def __init__(
        self, sampler: SamplingBackend, *, lease: Lease, checkpoint_root: Path, spill_root: Path, max_resident: int
    ) -> None:
        self._sampler = sampler
        self._lease = lease
        self._checkpoint_root = checkpoint_root
        self._spill_root = spill_root
        self._max_resident = max_resident
        self._held: dict[str, _Held] = {}  # least recently used first
        self._writing = asyncio.Lock()  # one writer at a time in the spill root

    def why_not(self, lora: LoraConfig) -> UserError | None:
        """Return why models of this configuration cannot be sampled from; None if they can."""
        sampler = self._sampler.capabilities
        if not sampler.sampling:
            msg = "this base model cannot be sampled from: it has no sampler; save with a name instead"
            return UserError(msg)
        if lora.rank == 0 and not sampler.full_fine_tuning:
            msg = (
                "this base model's sampler takes only LoRA adapters, but all weights of this model are trained (LoRA "
                "rank 0); save with a name instead: the checkpoint is a Hugging Face directory, which can be served "
                "as a base model of its own"
            )
            return UnsupportedError(msg)
        return None

    async def adopt(self, models: Mapping[str, str]) -> None:
        """Take over the ephemeral snapshots that an earlier engine wrote. `models` maps live ids to model_ids.

        Remove all others.
        """
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

    async def persist(self, model_id: str) -> None:
        """Write the model's ephemeral snapshots to disk: a recovery does not replay what precedes its start."""
        for snapshot_id, held in [each for each in self._held.items() if each[1].model_id == model_id]:
            async with held.loading:
                if not held.on_disk and held.snapshot is not None:
                    await self._write_out(held, held.snapshot)
                    if self._held.get(snapshot_id) is not held:  # the model was unloaded meanwhile
                        await asyncio.to_thread(delete_checkpoint, held.root, held.directory)

    async def add(self, snapshot: Snapshot, *, model_id: str, persisted: bool) -> None:
        """Load a new snapshot. A persisted one must have been written already."""
        held = self._entry(snapshot.snapshot_id) if persisted else self._ephemeral(snapshot.snapshot_id)
        held.model_id = model_id
        async with held.loading:
            await self._sampler.drop_snapshot(snapshot.snapshot_id)  # of a deleted checkpoint of the same name
            await self._sampler.load_snapshot(snapshot)
            held.snapshot = snapshot
        self._held[snapshot.snapshot_id] = held
        await self._make_room()

    @asynccontextmanager
    async def use(self, snapshot_id: str | None) -> AsyncIterator[None]:
        """Keep a snapshot in the sampler while the block runs. None is the base model.

        Raise NotFoundError or ServerError if it is gone.
        """
        if snapshot_id is None:
            yield
            return
        held = self._held.pop(snapshot_id, None) or self._entry(snapshot_id)
        self._held[snapshot_id] = held
        held.users += 1
        try:
            await self._load(snapshot_id, held)
            await self._make_room()
            yield
        except BaseException:
            if held.snapshot is None and held.users == 1:
                self._held.pop(snapshot_id, None)  # it does not exist
            raise
        finally:
            held.users -= 1

    async def discard(self, snapshot_id: str) -> None:
        """Drop a snapshot that no client knows yet. A persisted one stays on disk."""
        held = self._held.pop(snapshot_id, None)
        await self._sampler.drop_snapshot(snapshot_id)
        if held is not None and held.on_disk and held.root == self._spill_root:
            await asyncio.to_thread(delete_checkpoint, held.root, held.directory)

    async def drop_model(self, model_id: str) -> None:
        """Drop the ephemeral snapshots of a model, after the samples that are being drawn from them."""
        for snapshot_id, held in list(self._held.items()):
            if held.model_id == model_id and held.root == self._spill_root:
                del self._held[snapshot_id]
                await self._sampler.drop_snapshot(snapshot_id)
                if held.on_disk:
                    await asyncio.to_thread(delete_checkpoint, held.root, held.directory)

    def _entry(self, snapshot_id: str) -> _Held:
        if not snapshot_id.startswith("tinker://"):
            msg = (
                f"sampling snapshot {snapshot_id!r} is gone, because its session ended or its model was lost; save the "
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

    async def _make_room(self) -> None:
        resident = [(name, held) for name, held in self._held.items() if held.snapshot is not None]
        excess = len(resident) - self._max_resident
        for name, held in resident:
            if excess <= 0:
                return
            if held.users == 0 and not held.loading.locked():
                await self._spill(name, held)
                excess -= 1

    async def _spill(self, snapshot_id: str, held: _Held) -> None:
        async with held.loading:
            snapshot = held.snapshot
            if snapshot is None or held.users:
                return
            if not held.on_disk:
                await self._write_out(held, snapshot)
            if held.users == 0:
                held.snapshot = None
                await self._sampler.drop_snapshot(snapshot_id)

    @durable_boundary("snapshot.persist")
    async def _write_out(self, held: _Held, snapshot: Snapshot) -> None:
        async with self._writing:
            await asyncio.to_thread(self._write, held, snapshot)
        held.on_disk = True

    def _write(self, held: _Held, snapshot: Snapshot) -> None:
        write_checkpoint(
            held.root,
            held.directory,
            kind="sampler",
            state=ModelState(lora=snapshot.lora, weights=snapshot.adapter_weights()),
            base_model=self._lease.base_model,
            user_metadata={},
            created_at=datetime.now(UTC),
            overwrite=True,
            epoch=self._lease.epoch,
        )
