"""The recovery points of one engine: when one is due, writing it, and removing those that are no longer needed.

A recovery point is a training checkpoint below the recovery root. It is registered in the store once it is complete.
Its directory is named after its seq_id and its engine: a superseded engine may go on writing for a moment, but never
to a directory of its successor.
"""

import asyncio
import secrets
import shutil
import time
from collections.abc import Collection
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

from tinsmith.backend import ModelState
from tinsmith.checkpoints.format import delete_checkpoint, read_checkpoint, write_checkpoint
from tinsmith.checkpoints.sizes import size_of
from tinsmith.engine.call_watch import CallWatch
from tinsmith.engine.failures import in_a_thread
from tinsmith.failpoints import durable_boundary
from tinsmith.settings import RecoverySettings, WatchdogSettings
from tinsmith.store import Lease, RecoveryPointRecord, RequestStore


@dataclass(slots=True)
class _Model:
    seq_id: int = -1  # the last operation that has run
    operations: int = 0  # since the last recovery point
    taken_at_s: float = field(default_factory=time.monotonic)
    taking: int | None = None  # the seq_id of the recovery point that is being written in the background
    writing: asyncio.Lock = field(default_factory=asyncio.Lock)


class RecoveryPoints:
    """Belongs to one event loop; files are written in other threads."""

    def __init__(
        self,
        store: RequestStore,
        lease: Lease,
        *,
        root: Path,
        settings: RecoverySettings,
        watch: CallWatch | None = None,
    ) -> None:
        self._store = store
        self._watch = watch or CallWatch(WatchdogSettings())
        self._root = root
        self._lease = lease
        self._settings = settings
        self._engine = secrets.token_hex(4)
        self._models: dict[str, _Model] = {}

    @property
    def keep(self) -> int:
        return self._settings.keep_points

    def ran(self, model_id: str, seq_id: int, *, operations: int = 1) -> None:
        """Note that operations up to this one have run on the backend.

        Operations that change nothing count too, so that the log before the oldest recovery point can be pruned.
        """
        model = self._models.setdefault(model_id, _Model())
        model.seq_id = seq_id
        model.operations += operations

    def due(self, model_id: str) -> bool:
        model = self._models[model_id]
        if model.taking is not None or model.operations == 0:
            return False
        late = time.monotonic() - model.taken_at_s >= self._settings.point_every_s
        return late or model.operations >= self._settings.point_every_operations

    def begin(self, model_id: str) -> int:
        """Start a new count. Return the seq_id of the state that must be captured now. `end` must follow."""
        model = self._models[model_id]
        model.operations, model.taken_at_s, model.taking = 0, time.monotonic(), model.seq_id
        return model.seq_id

    def end(self, model_id: str) -> None:
        if (model := self._models.get(model_id)) is not None:
            model.taking = None

    async def replaced_bytes(self, model_id: str) -> int:
        """Return the size of the recovery point that the next one replaces, or 0."""
        registered = await self._store.list_recovery_points(model_id)
        return registered[-1].size_bytes if len(registered) >= self.keep else 0

    @durable_boundary("recovery_point.write")
    async def write(self, model_id: str, seq_id: int, state: ModelState) -> RecoveryPointRecord:
        """Make it durable. It is not used before it is registered. Raise ServerError if the disk fails."""
        directory = f"{model_id}/{seq_id}-{self._engine}"
        now = datetime.now(UTC)
        write = partial(
            write_checkpoint,
            kind="training",
            state=state,
            base_model=self._lease.base_model,
            user_metadata={},
            created_at=now,
            overwrite=True,
            epoch=self._lease.epoch,
        )
        async with self._models.setdefault(model_id, _Model()).writing:
            files = self._watch.files(partial(write, self._root, directory), size_of(state, "training"))
            size = await in_a_thread(files)
        return RecoveryPointRecord(
            model_id=model_id, seq_id=seq_id, directory=directory, size_bytes=size, created_at=now
        )

    @durable_boundary("recovery_point.register")
    async def register(self, record: RecoveryPointRecord) -> None:
        """Raise ServerError if the results up to it are not recorded, or the model has ended."""
        await self._store.add_recovery_point(self._lease, record, keep=self.keep)
        await self.tidy(record.model_id)

    async def tidy(self, model_id: str) -> None:
        """Remove files that are not registered, except those that may be registered soon: newer ones, and our own."""
        model = self._models.setdefault(model_id, _Model())
        async with model.writing:
            registered = await self._store.list_recovery_points(model_id)
            if registered:
                kept = {Path(record.directory).name for record in registered}
                await asyncio.to_thread(self._remove_older, model_id, registered[0].seq_id, kept)

    def _remove_older(self, model_id: str, newest: int, kept: Collection[str]) -> None:
        taking = self._models.get(model_id, _Model()).taking
        for name in _names(self._root / model_id) - set(kept):
            seq_id = int(name.split("-")[0])
            if seq_id <= newest and seq_id != taking:
                delete_checkpoint(self._root, f"{model_id}/{name}")

    async def forget(self, model_id: str) -> None:
        """Remove all recovery points of a model that has ended."""
        model = self._models.pop(model_id, _Model())
        async with model.writing:
            await asyncio.to_thread(shutil.rmtree, self._root / model_id, ignore_errors=True)

    async def keep_only(self, model_ids: Collection[str]) -> None:
        """Remove what earlier engines left of models that have since ended."""
        found = await asyncio.to_thread(_names, self._root)
        for model_id in found - set(model_ids):
            await self.forget(model_id)

    async def read(self, record: RecoveryPointRecord) -> ModelState:
        """Raise TinsmithError if it is missing or damaged."""
        checkpoint = await asyncio.to_thread(
            self._watch.files(partial(read_checkpoint, self._root, record.directory), record.size_bytes)
        )
        return checkpoint.state


def _names(directory: Path) -> set[str]:
    if not directory.is_dir():
        return set()
    return {path.name for path in directory.iterdir() if path.is_dir() and not path.name.startswith(".")}
