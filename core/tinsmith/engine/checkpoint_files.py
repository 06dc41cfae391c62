"""The checkpoints that operations read and write: what may be loaded, and which files may be replaced."""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path

from tinsmith import operations as ops
from tinsmith.backend import ModelState
from tinsmith.checkpoints.saved import delete_checkpoint, read_checkpoint
from tinsmith.checkpoints.tinker_path import TinkerPath
from tinsmith.engine.call_watch import CallWatch
from tinsmith.engine.context import EngineContext
from tinsmith.engine.failures import with_retries
from tinsmith.errors import NotFoundError, ServerError, UserError
from tinsmith.failpoints import durable_boundary
from tinsmith.operations import ReadRight
from tinsmith.settings import WatchdogSettings
from tinsmith.store import CheckpointRecord, OperationRecord, RequestStore
from tinsmith.store.codec import decode_result
from tinsmith.store.revocation import loadable_checkpoint, why_gone
from tinsmith_checkpoints.format import Checkpoint
from tinsmith_checkpoints.sizes import size_of

_log = logging.getLogger(__name__)


Save = ops.SaveState | ops.SaveForSampler | ops.ExportAdapter


class CheckpointReader:
    """Reads training states of one base model. Files are read outside the event loop and the training thread."""

    def __init__(self, store: RequestStore, root: Path, *, base_model: str, watch: CallWatch | None = None) -> None:
        self._store = store
        self._watch = watch or CallWatch(WatchdogSettings())
        self._root = root
        self._base_model = base_model

    async def state_at(
        self, path: str, *, load_optimizer: bool, right: ReadRight, tenant: str
    ) -> tuple[ModelState, str]:
        """Return the state that loading `path` restores, and the directory of the version that it is of.

        Raise RevokedError if the right that the operation had when it was submitted does not hold any more.
        """

        def find() -> Awaitable[CheckpointRecord]:
            return loadable_checkpoint(self._store, path, tenant=tenant, right=right, now=datetime.now(UTC))

        record, checkpoint = await self._read(find)
        return _loaded(checkpoint, load_optimizer=load_optimizer), record.directory

    async def state_at_replay(self, path: str, *, load_optimizer: bool, of: OperationRecord) -> ModelState:
        """Return the state that a recorded operation loaded. Raise ServerError if `path` was overwritten since."""
        record, checkpoint = await self._read(partial(self._store.get_checkpoint, path))
        if record.directory != _version_loaded(of):
            msg = f"{path!r}, which seq_id {of.seq_id} loaded, has been overwritten since"
            raise ServerError(msg)
        return _loaded(checkpoint, load_optimizer=load_optimizer)

    async def _read(self, find: Callable[[], Awaitable[CheckpointRecord]]) -> tuple[CheckpointRecord, Checkpoint]:
        """Read the version that `find` returns. Ask again if that was replaced, and its files deleted, meanwhile."""
        record = await with_retries(find)
        try:
            read = partial(read_checkpoint, self._root, record.directory)
            checkpoint = await asyncio.to_thread(self._watch.files(read, record.size_bytes))
        except NotFoundError:
            if (await with_retries(find)).directory == record.directory:
                raise
            return await self._read(find)
        path = record.path
        if checkpoint.kind != "training":
            msg = f"{path!r} is a {checkpoint.kind} checkpoint; load one of save_state (.../weights/...)"
            raise UserError(msg)
        if checkpoint.base_model != self._base_model:
            msg = f"{path!r} is a checkpoint of base model {checkpoint.base_model!r}, not of {self._base_model!r}"
            raise UserError(msg)
        return record, checkpoint


class Checkpoints(CheckpointReader):
    """Also writes the checkpoints that clients ask for."""

    def __init__(self, engine: EngineContext) -> None:
        super().__init__(engine.store, engine.data_dir.checkpoints, base_model=engine.base_model, watch=engine.watch)
        self._engine = engine
        self._versions: dict[str, set[str]] = {}  # by path: directories, one of which the save's result records

    @durable_boundary("checkpoint.write")
    async def write(
        self, operation: Save, state: ModelState, record: OperationRecord, *, directory: str | None = None
    ) -> CheckpointRecord:
        """Make the checkpoint that an operation asks for durable, and return its record. `tidy` must follow.

        `directory` is one that `TinkerPath.new_directory` returned; None: a new one. Raise UserError if the name is
        taken, the disk has no room for it, or the model has diverged.
        """
        assert operation.path is not None
        path, now = TinkerPath.parse(operation.path), datetime.now(UTC)
        num_bytes, directory = size_of(state, path.kind), directory or path.new_directory()
        metadata = {} if isinstance(operation, ops.ExportAdapter) else operation.user_metadata
        ttl_s = operation.ttl_seconds
        await self._engine.room.expect(record.tenant, num_bytes)
        replaces = isinstance(operation, ops.SaveState) and operation.overwrite
        await self._begin_version(operation.path, directory, now, overwrite=replaces)
        size = await self._engine.write_state(
            self._root,
            directory,
            path.kind,
            lambda: state,
            num_bytes=num_bytes,
            created_at=now,
            asked_with=metadata,
            recipients=operation.recipients if isinstance(operation, ops.ExportAdapter) else (),
        )
        return CheckpointRecord(
            path=operation.path,
            model_id=path.model_id,
            tenant=record.tenant,
            kind=path.kind,
            base_model=self._base_model,
            lora=state.lora,
            created_at=now,
            size_bytes=size,
            directory=directory,
            step=state.step,
            expires_at=None if ttl_s is None else now + timedelta(seconds=ttl_s),
            user_metadata=dict(metadata),
        )

    async def _begin_version(self, path: str, directory: str, now: datetime, *, overwrite: bool) -> None:
        """Remember what `tidy` may have to delete. Raise UserError if the name is taken."""
        replaced = await self._recorded(path)
        if replaced is not None and not overwrite and why_gone(replaced, None, now) is None:
            msg = f"checkpoint {path!r} exists already; choose another name, or pass overwrite=True to replace it"
            raise UserError(msg)
        self._versions[path] = {directory} if replaced is None else {directory, replaced.directory}

    async def _recorded(self, path: str) -> CheckpointRecord | None:
        try:
            return await with_retries(self._store.get_checkpoint, path)
        except NotFoundError:
            return None

    async def remove(self, written: CheckpointRecord) -> None:
        """Delete the files of a checkpoint that will not be recorded."""
        await asyncio.to_thread(delete_checkpoint, self._root, written.directory)

    async def tidy(self, path: str) -> None:
        """Once the result of a save is recorded, delete the version that it replaced, or its own if that was refused.

        What cannot be deleted now is an orphan, which housekeeping removes.
        """
        versions = self._versions.pop(path, set())
        try:
            recorded = await self._recorded(path) if versions else None
            for directory in versions - {recorded.directory if recorded else None}:
                await asyncio.to_thread(delete_checkpoint, self._root, directory)
        except ServerError as error:
            _log.warning("old files of checkpoint %s are still there: %s", path, error)


def _loaded(checkpoint: Checkpoint, *, load_optimizer: bool) -> ModelState:
    if load_optimizer:
        return checkpoint.state
    return replace(checkpoint.state, adam_m={}, adam_v={}, gradients={}, step=0)


def _version_loaded(of: OperationRecord) -> str | None:
    if of.result_kind is None or of.result is None:
        return None
    result = decode_result(of.result_kind, of.result)
    return result.version if isinstance(result, ops.WeightsLoaded | ops.ModelCreated) else None
