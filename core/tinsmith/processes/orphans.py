"""Removes the files of checkpoints that no record refers to.

They are left by an engine or command that died before its save was recorded, by an engine that was paused and finished
its save after another had taken over, and by deletions that were cut short.
"""

import asyncio
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Final

from tinsmith.checkpoints.saved import delete_checkpoint
from tinsmith.checkpoints.tinker_path import TinkerPath, versions_on_disk
from tinsmith.errors import NotFoundError, UserError
from tinsmith.store import RequestStore, RunState

_WRITING_S = 3600.0
"""A command that imports a checkpoint, or writes one from a replay, records it within this time."""

_PART: Final = 1000  # directories whose records are read together


async def remove_orphans(store: RequestStore, root: Path, *, older_than_s: float = _WRITING_S) -> list[str]:
    """Return the directories that were removed. What this store knows nothing of is left: it may be another's."""
    removed = []
    found = await asyncio.to_thread(lambda: list(_paths_on_disk(root, older_than_s)))
    for start in range(0, len(found), _PART):
        part = found[start : start + _PART]
        # Almost all are recorded. Only the others are looked at one by one, in an order that matters.
        recorded = await store.recorded_directories({str(path) for _, path in part})
        for directory, path in part:
            if directory not in recorded and await _is_orphan(store, directory, path):
                await asyncio.to_thread(delete_checkpoint, root, directory)
                removed.append(directory)
    return removed


def _paths_on_disk(root: Path, older_than_s: float) -> Iterator[tuple[str, TinkerPath]]:
    for directory in versions_on_disk(root, older_than_s=older_than_s):
        with suppress(UserError):  # no directory of a checkpoint
            yield directory, TinkerPath.of_directory(directory)


async def _is_orphan(store: RequestStore, directory: str, path: TinkerPath) -> bool:
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
