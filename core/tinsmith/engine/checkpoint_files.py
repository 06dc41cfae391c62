"""The checkpoints that operations write and read: which files may be replaced, and what may be loaded."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path

from tinsmith.backend import ModelState
from tinsmith.checkpoints.format import SHARD_BYTES, Checkpoint, delete_checkpoint, read_checkpoint, write_checkpoint
from tinsmith.checkpoints.tinker_path import TinkerPath
from tinsmith.errors import ServerError, UserError
from tinsmith.failpoints import durable_boundary
from tinsmith.store import CheckpointKind, CheckpointRecord, OperationRecord


class CheckpointFiles:
    """Of one base model. Files are written and read in other threads, one model's beside another's training."""

    def __init__(
        self,
        root: Path,
        *,
        base_model: str,
        is_recorded: Callable[[str], Awaitable[bool]],
        epoch: int = 0,
        model_path: Path | None = None,
        shard_bytes: int = SHARD_BYTES,
    ) -> None:
        """`is_recorded` says whether the store knows a checkpoint of this path; `epoch` is the lease's.

        `model_path` is the base model's.
        """
        self._root = root
        self._epoch = epoch
        self._base_model = base_model
        self._model_path = model_path
        self._shard_bytes = shard_bytes
        self._is_recorded = is_recorded

    @durable_boundary("checkpoint.write")
    async def write(
        self,
        path: str,
        kind: CheckpointKind,
        state: ModelState,
        record: OperationRecord,
        *,
        ttl_seconds: int | None,
        overwrite: bool = False,
        user_metadata: Mapping[str, str] | None = None,
    ) -> CheckpointRecord:
        """Make it durable and describe it."""
        # a directory that the store does not know is what an engine that died had written: it is written again
        overwrite = overwrite or not await self._is_recorded(path)
        now = datetime.now(UTC)
        parsed = TinkerPath.parse(path)
        write = partial(
            write_checkpoint,
            kind=kind,
            state=state,
            base_model=self._base_model,
            user_metadata=user_metadata or {},
            created_at=now,
            overwrite=overwrite,
            epoch=self._epoch,
            model_path=self._model_path,
            shard_bytes=self._shard_bytes,
        )
        size = await asyncio.to_thread(write, self._root, parsed.directory)
        return CheckpointRecord(
            path=path,
            model_id=parsed.model_id,
            tenant=record.tenant,
            kind=kind,
            base_model=self._base_model,
            lora=state.lora,
            created_at=now,
            size_bytes=size,
            directory=parsed.directory,
            step=state.step,
            expires_at=None if ttl_seconds is None else now + timedelta(seconds=ttl_seconds),
            user_metadata=dict(user_metadata or {}),
        )

    async def remove(self, path: str) -> None:
        """Delete the files of a checkpoint that was not recorded after all."""
        await asyncio.to_thread(delete_checkpoint, self._root, TinkerPath.parse(path).directory)

    async def state_at(self, path: str, *, load_optimizer: bool, by: OperationRecord | None = None) -> ModelState:
        """Return what loading it gives. `by` loaded it once, and must find what it found then."""
        checkpoint = await self._read(path)
        if by is not None and (by.finished_at is None or checkpoint.created_at > by.finished_at):
            msg = f"{path!r}, which seq_id {by.seq_id} loaded, has been overwritten since"
            raise ServerError(msg)
        if load_optimizer:
            return checkpoint.state
        return replace(checkpoint.state, adam_m={}, adam_v={}, gradients={}, step=0)

    async def _read(self, path: str) -> Checkpoint:
        directory = TinkerPath.parse(path).directory
        checkpoint: Checkpoint = await asyncio.to_thread(read_checkpoint, self._root, directory)
        if checkpoint.kind != "training":
            msg = f"{path!r} is a {checkpoint.kind} checkpoint; training loads what save_state wrote (.../weights/...)"
            raise UserError(msg)
        if checkpoint.base_model != self._base_model:
            msg = f"{path!r} is of base model {checkpoint.base_model!r}, not of {self._base_model!r}"
            raise UserError(msg)
        return checkpoint
