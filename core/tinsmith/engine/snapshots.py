"""The snapshots of one engine: which are in the sampler, which only on disk, and loading those again."""

import asyncio
import logging
import secrets
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Final

from tinsmith import operations as ops
from tinsmith.backend import ModelState, SamplingBackend, Snapshot
from tinsmith.checkpoints.atomic_directory import directories_in
from tinsmith.checkpoints.saved import delete_checkpoint, read_snapshot
from tinsmith.checkpoints.tinker_path import VERSION_MARK, TinkerPath
from tinsmith.checks import why_not_sampled
from tinsmith.engine.backend_calls import NoSampler
from tinsmith.engine.context import EngineContext
from tinsmith.engine.failures import with_retries
from tinsmith.errors import NotFoundError, ServerError, UnsupportedError, UserError
from tinsmith.failpoints import durable_boundary
from tinsmith.host import host_memory
from tinsmith.operations import LoraConfig
from tinsmith.store.revocation import usable_checkpoint, why_gone

_log = logging.getLogger(__name__)
_PERSISTED: Final = "tinker://"
_SHARE_OF_MEMORY: Final = 4  # snapshots take this part of the host's, unless configured otherwise


@dataclass(slots=True)
class _Held:
    """One snapshot. `snapshot` is None while it is only on disk, in `directory` of `root`."""

    root: Path
    directory: str
    on_disk: bool
    model_id: str | None = None
    snapshot: Snapshot | None = None
    num_bytes: int = 0  # of the snapshot: to ask each again at every sample would take long
    users: int = 0
    loading: asyncio.Lock = field(default_factory=asyncio.Lock)
    last_used: float = field(default_factory=time.monotonic)

    def loaded(self, snapshot: Snapshot) -> None:
        self.snapshot, self.num_bytes = snapshot, snapshot.num_bytes


@dataclass(slots=True, eq=False)
class _Use:
    """A sample from a snapshot, or whatever else keeps it in the sampler."""

    snapshot_id: str  # with which it began
    held: list[_Held]  # of this snapshot, and after it of the one with which the sample goes on


@dataclass(slots=True, eq=False)
class _Inflight:
    """A snapshot of inflight sessions. It stays known when it is dropped."""

    model_id: str
    passed: bool  # it is not going to be refused any more


class Snapshots:
    """Keeps the snapshots that were used last in the sampler, and those that are being sampled from.

    Ephemeral snapshots survive restarts of the engine, and live until their model is unloaded, that is until their
    session ends: any holder of a sampling session's name may use it until then, and no request gives it back
    (decision 0020). Persisted ones, whose id names a version of a checkpoint, are read from it when they are needed.
    They live as long as it does. Another version has another id, so a sample never gets it by mistake.
    """

    def __init__(self, engine: EngineContext, sampler: SamplingBackend) -> None:
        self._engine = engine
        self._sampler = sampler
        self._checkpoint_root = engine.data_dir.checkpoints
        self._spill_root = engine.data_dir.spilled_snapshots(engine.base_model)
        self._model = engine.model
        self._max_bytes = engine.model.resident_snapshot_bytes or host_memory() // _SHARE_OF_MEMORY
        # A superseded engine may write on for a moment, but never to a directory of its successor.
        self._version = f"{VERSION_MARK}{secrets.token_hex(4)}"
        self._held: dict[str, _Held] = {}  # least recently used first
        self._uses: set[_Use] = set()
        self._inflight: dict[str, _Inflight] = {}  # in order of their saves, also those that were dropped since
        self._newest: dict[str, str] = {}  # of the inflight ones, by model_id
        self._writing = asyncio.Lock()  # one writer at a time in the spill root
        self._moving = asyncio.Lock()  # samples are moved in one order, here and in the sampler

    def why_not(self, lora: LoraConfig) -> UserError | None:
        """Return why models of this configuration cannot be sampled from; None if they can."""
        if isinstance(self._sampler, NoSampler):
            msg = "this base model cannot be sampled from: it has no sampler; save with a name instead"
            return UserError(msg)
        reason = why_not_sampled(lora, self._sampler.sampler_capabilities)  # another sampler than at its creation
        return None if reason is None else UnsupportedError(f"{reason}; or save with a name, for use elsewhere")

    async def adopt(self, models: Mapping[str, str]) -> None:
        """Take over the ephemeral snapshots that an earlier engine wrote. `models` maps live ids to model_ids.

        The ids are in order of their saves. Remove all others.
        """
        for name, model_id in models.items():
            if name.endswith(ops.INFLIGHT):
                self.follow(model_id, name)
                self._inflight[name].passed = True  # or it is compared again before anybody samples from it
        for name in await asyncio.to_thread(directories_in, self._spill_root):
            snapshot_id = name.partition(VERSION_MARK)[0]
            if snapshot_id in models and snapshot_id not in self._held:
                self._held[snapshot_id] = _Held(
                    root=self._spill_root, directory=name, on_disk=True, model_id=models[snapshot_id]
                )
            else:
                await asyncio.to_thread(delete_checkpoint, self._spill_root, name)

    def holds(self, snapshot_id: str) -> bool:
        return snapshot_id in self._held

    def model_of(self, snapshot_id: str | None) -> str | None:
        """Return the model that a snapshot was saved from. None: it is the base model, or gone."""
        if snapshot_id is None:
            return None
        if _is_persisted(snapshot_id):
            return TinkerPath.of_directory(_directory(snapshot_id)).model_id
        held = self._held.get(snapshot_id)
        return None if held is None else held.model_id

    def follow(self, model_id: str, snapshot_id: str) -> None:
        """From now on, samples of the model's inflight sessions are drawn from this snapshot."""
        self._inflight[snapshot_id] = _Inflight(model_id, passed=False)
        self._newest[model_id] = snapshot_id

    def newest(self, snapshot_id: str | None) -> str | None:
        """Return the id of the snapshot to sample from: instead of an inflight one, the newest of its model."""
        saved = None if snapshot_id is None else self._inflight.get(snapshot_id)
        return snapshot_id if saved is None else self._newest[saved.model_id]

    async def passed(self, snapshot_id: str) -> None:
        """Note that samples of a snapshot may be given away. The caller keeps it in the sampler.

        If it is an inflight one, its model's running samples go on with it, where the sampler can do that: those from
        earlier snapshots that have passed, unless a later one has passed before it.
        """
        saved = self._inflight.get(snapshot_id)
        if saved is None:
            return
        saved.passed = True
        if self._sampler.sampler_capabilities.inflight != "between_tokens":
            return
        async with self._moving:
            others = [each for each in self._inflight.values() if each.model_id == saved.model_id and each.passed]
            if others[-1] is not saved:
                return
            for name in {use.snapshot_id for use in self._uses}:
                earlier = self._inflight.get(name)
                if earlier in others and earlier is not saved:
                    await self._move(name, snapshot_id)

    async def _move(self, snapshot_id: str, newer_id: str) -> None:
        """Let the samples of a snapshot go on with a newer one, which stays in the sampler as long as they do.

        So does the one with which they began: by its id the sampler knows them.
        """
        await self._sampler.move_samples(snapshot_id, newer_id)
        newer = self._held[newer_id]
        for use in self._uses:
            if use.snapshot_id == snapshot_id:
                for former in use.held[1:]:
                    former.users -= 1
                use.held[1:] = [newer]
                newer.users += 1

    async def persist(self, model_id: str) -> None:
        """Write the model's ephemeral snapshots to disk: a recovery does not replay what precedes its start."""
        for snapshot_id, held in [each for each in self._held.items() if each[1].model_id == model_id]:
            async with held.loading:
                if not held.on_disk and held.snapshot is not None and self._held.get(snapshot_id) is held:
                    await self._write_out(held, held.snapshot)

    async def add(self, snapshot: Snapshot, *, model_id: str) -> None:
        """Load a new snapshot."""
        persisted = _is_persisted(snapshot.snapshot_id)
        held = self._entry(snapshot.snapshot_id) if persisted else self._ephemeral(snapshot.snapshot_id)
        held.model_id = model_id
        async with held.loading:
            await self._sampler.load_snapshot(snapshot)
            held.loaded(snapshot)
        self._held[snapshot.snapshot_id] = held
        await self._make_room()

    @asynccontextmanager
    async def for_sample(self, operation: ops.Sample) -> AsyncIterator[ops.Sample]:
        """Keep the snapshot of a sample in the sampler while the block runs, if its session may still use it.

        Yield the sample, with the id by which the sampler knows the snapshot. Raise RevokedError if the session may not
        use it, and what `use` raises.
        """
        if operation.snapshot_id is not None and _is_persisted(operation.snapshot_id):
            session = await with_retries(self._engine.store.get_sampling_session, operation.sampling_session_id)
            found = await with_retries(usable_checkpoint, self._engine.store, session, datetime.now(UTC))
            if found is not None:
                operation = replace(operation, snapshot_id=persisted_id(found.directory))
        async with self.use(operation.snapshot_id):
            yield operation

    async def drop_unused(self) -> None:
        """Drop the snapshots of checkpoints that were deleted or have expired: nobody may use them any more.

        Also the ephemeral ones that nobody has sampled from for `idle_s`, but for the last used of each model. A
        restart of the engine counts as a use. Those that are being sampled from are left for the next call.
        """
        last = {held.model_id: held for held in self._held.values() if held.root == self._spill_root}
        for snapshot_id, held in list(self._held.items()):
            persisted = _is_persisted(snapshot_id)
            unused = await self._is_gone(held) if persisted else last[held.model_id] is not held and self._is_idle(held)
            if unused and held.users == 0 and self._held.get(snapshot_id) is held:
                await self.discard(snapshot_id)

    def _is_idle(self, held: _Held) -> bool:
        return (idle_s := self._model.ephemeral_idle_s) is not None and held.last_used <= time.monotonic() - idle_s

    async def _is_gone(self, held: _Held) -> bool:
        try:
            found = await with_retries(self._engine.store.get_checkpoint, str(TinkerPath.of_directory(held.directory)))
        except NotFoundError:
            return True
        return found.directory != held.directory or why_gone(found, None, datetime.now(UTC)) is not None

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
        use = _Use(snapshot_id, [held])
        self._uses.add(use)
        try:
            await self._load(snapshot_id, held)
            await self._make_room()
            yield
        except BaseException:
            if held.snapshot is None and held.users == 1:
                self._held.pop(snapshot_id, None)  # it does not exist
            raise
        finally:
            self._uses.remove(use)
            for each in use.held:
                each.users -= 1
                each.last_used = time.monotonic()

    async def discard(self, snapshot_id: str) -> None:
        """Drop a snapshot that nobody may use. The files of a persisted one are not touched."""
        held = self._held.pop(snapshot_id, None)
        if held is None:
            await self._sampler.drop_snapshot(snapshot_id)
        else:
            await self._drop(snapshot_id, held)

    async def drop_model(self, model_id: str) -> None:
        """Drop the ephemeral snapshots of a model, after the samples that are being drawn from them."""
        if self._newest.pop(model_id, None) is not None:
            self._inflight = {name: each for name, each in self._inflight.items() if each.model_id != model_id}
        for snapshot_id, held in list(self._held.items()):
            if held.model_id == model_id and held.root == self._spill_root and self._held.get(snapshot_id) is held:
                del self._held[snapshot_id]
                await self._drop(snapshot_id, held)

    async def _drop(self, snapshot_id: str, held: _Held) -> None:
        """Remove what was taken out of `_held` from the sampler and, if it is ephemeral, from the disk.

        Wait for its loads and writes in progress, so that nothing is left.
        """
        async with held.loading:
            await self._sampler.drop_snapshot(snapshot_id)
            if held.on_disk and held.root == self._spill_root:
                await asyncio.to_thread(delete_checkpoint, held.root, held.directory)

    def _entry(self, snapshot_id: str) -> _Held:
        if not _is_persisted(snapshot_id):
            idle_s = self._model.ephemeral_idle_s
            unused = "" if idle_s is None else f", or nobody sampled from it for {idle_s:g} s (ephemeral_idle_s)"
            msg = (
                f"sampling snapshot {snapshot_id!r} is gone, because its session ended or its model was lost{unused}; "
                "save the weights for sampling again"
            )
            raise ServerError(msg)
        return _Held(root=self._checkpoint_root, directory=_directory(snapshot_id), on_disk=True)

    def _ephemeral(self, snapshot_id: str) -> _Held:
        return _Held(root=self._spill_root, directory=f"{snapshot_id}{self._version}", on_disk=False)

    async def _load(self, snapshot_id: str, held: _Held) -> None:
        async with held.loading:
            if held.snapshot is None:
                read = partial(read_snapshot, held.root, held.directory, snapshot_id)
                snapshot = await asyncio.to_thread(self._engine.watch.files(read))
                await self._sampler.load_snapshot(snapshot)
                held.loaded(snapshot)

    async def _make_room(self) -> None:
        """Move those to disk that were used longest ago, until number and bytes are within their limits.

        One for which the disk has no room stays in memory; further saves are refused then.
        """
        resident = [each for each in self._held.items() if each[1].snapshot is not None]
        number, size = len(resident), sum(held.num_bytes for _, held in resident)
        room = self._sampler.sampler_capabilities.max_snapshots
        most = self._model.resident_snapshots if room is None else min(room, self._model.resident_snapshots)
        for name, held in resident:
            if number <= most and size <= self._max_bytes:
                return
            if held.users == 0 and not held.loading.locked():
                if not held.on_disk and (why := await self._engine.room.why_not(held.num_bytes)) is not None:
                    _log.warning("snapshot %s stays in memory: %s", name, why)
                    continue
                await self._spill(name, held)
                number, size = number - 1, size - held.num_bytes

    async def _spill(self, snapshot_id: str, held: _Held) -> None:
        async with held.loading:
            snapshot = held.snapshot
            if snapshot is None or held.users or self._held.get(snapshot_id) is not held:
                return
            if not held.on_disk:
                await self._write_out(held, snapshot)
            if held.users == 0:
                held.snapshot = None
                await self._sampler.drop_snapshot(snapshot_id)

    @durable_boundary("snapshot.persist")
    async def _write_out(self, held: _Held, snapshot: Snapshot) -> None:
        async with self._writing:
            if (why := await self._engine.room.why_not(snapshot.num_bytes)) is not None:
                raise UserError(why)
            await self._engine.write_state(
                held.root,
                held.directory,
                "sampler",
                lambda: ModelState(lora=snapshot.lora, weights=snapshot.adapter_weights()),
                num_bytes=snapshot.num_bytes,
                created_at=datetime.now(UTC),
            )
        held.on_disk = True


def persisted_id(directory: str) -> str:
    """Return the id of the snapshot that lies in a directory of the checkpoint root."""
    return _PERSISTED + directory


def _is_persisted(snapshot_id: str) -> bool:
    """Return whether the id names a checkpoint, or is its path."""
    return snapshot_id.startswith(_PERSISTED)


def _directory(persisted: str) -> str:
    return persisted.removeprefix(_PERSISTED)
