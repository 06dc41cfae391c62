"""Removes the files of checkpoints that no record refers to.

They are left by an engine or command that died before its save was recorded, by an engine that was paused and finished
its save after another had taken over, and by deletions that were cut short.
"""

import asyncio
from pathlib import Path

from tinsmith.checkpoints.format import delete_checkpoint
from tinsmith.checkpoints.tinker_path import TinkerPath
from tinsmith.checkpoints.versions import versions_on_disk
from tinsmith.errors import NotFoundError, UserError
from tinsmith.store import RequestStore, RunState

_WRITING_S = 3600.0
"""A command that imports a checkpoint, or writes one from a replay, records it within this time."""


async def remove_orphans(store: RequestStore, root: Path, *, older_than_s: float = _WRITING_S) -> list[str]:
    """Return the directories that were removed. What this store knows nothing of is left: it may be another's."""
    removed = []
    for directory in await asyncio.to_thread(lambda: list(versions_on_disk(root, older_than_s=older_than_s))):
        if await _is_orphan(store, directory):
            await asyncio.to_thread(delete_checkpoint, root, directory)
            removed.append(directory)
    return removed


async def _is_orphan(store: RequestStore, directory: str) -> bool:
    try:
        path = TinkerPath.of_directory(directory)
    except UserError:
        return False
    # First the model, then the record: a save that is recorded in between is found by the second look.
    known = await _is_idle(store, path.model_id)
    if known is False:
        return False
    try:
        return (await store.get_checkpoint(str(path))).directory != directory
    except NotFoundError:
        return known is True or await _was_deleted(store, str(path))


async def _is_idle(store: RequestStore, model_id: str) -> bool | None:
    """Return whether no engine can be writing a checkpoint of this model; None if the store does not know the model."""
    try:
        run = await store.get_run(model_id)
    except NotFoundError:
        return None
    ended = run.state in {RunState.LOST, RunState.UNLOADED}
    return ended or run.next_seq_id <= run.applied_seq_id + 1


async def _was_deleted(store: RequestStore, path: str) -> bool:
    try:
        await store.deleted_checkpoint(path)
    except NotFoundError:
        return False
    return True
