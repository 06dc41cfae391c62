"""Checkpoints: which ones exist, whose they are, and which were deleted."""

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import replace
from datetime import UTC, datetime

from tinsmith.memory_store.memory import Memory
from tinsmith.memory_store.rows import newest_first
from tinsmith.memory_store.subjects import audit
from tinsmith.store import CheckpointKind, CheckpointRecord, KeptCheckpoints, Position, refusals
from tinsmith.store.audit import changes_of
from tinsmith.store.refusals import refuse_large_metadata


def list_all(
    memory: Memory, tenant: str | None, *, model_id: str | None = None, limit: int | None = None, offset: int = 0
) -> tuple[list[CheckpointRecord], int]:
    found = _newest_first(each for each in _of_tenant(memory, tenant) if model_id in (None, each.model_id))
    return found[offset : None if limit is None else offset + limit], len(found)


def walk(memory: Memory, tenant: str | None, *, before: Position | None = None, limit: int) -> list[CheckpointRecord]:
    return _newest_first(_of_tenant(memory, tenant), before)[:limit]


def of_sessions(memory: Memory, session_ids: Collection[str]) -> dict[str, KeptCheckpoints]:
    sizes: defaultdict[str, list[int]] = defaultdict(list)
    for each in memory.checkpoints.values():
        run = memory.runs.get(each.model_id)
        if run is not None and run.record.session_id in session_ids:
            sizes[run.record.session_id].append(each.size_bytes)
    return {key: KeptCheckpoints(number=len(found), num_bytes=sum(found)) for key, found in sizes.items()}


def newest(memory: Memory, model_ids: Collection[str]) -> list[CheckpointRecord]:
    found: dict[tuple[str, CheckpointKind], CheckpointRecord] = {}
    for each in reversed(_newest_first(memory.checkpoints.values())):
        run = memory.runs.get(each.model_id)
        if each.model_id in model_ids and run is not None and run.record.tenant == each.tenant:
            found[each.model_id, each.kind] = each
    return list(found.values())


def directories(memory: Memory, paths: Collection[str]) -> set[str]:
    return {each.directory for path, each in memory.checkpoints.items() if path in paths}


def kept(memory: Memory, tenant: str) -> KeptCheckpoints:
    sizes = [each.size_bytes for each in _of_tenant(memory, tenant)]
    return KeptCheckpoints(number=len(sizes), num_bytes=sum(sizes))


def add(memory: Memory, record: CheckpointRecord) -> None:
    refuse_large_metadata(record.user_metadata)
    if record.path in memory.checkpoints:
        raise refusals.checkpoint_exists(record.path)
    _put(memory, record)


def write(memory: Memory, record: CheckpointRecord) -> None:
    """Record a checkpoint that an operation has written. One that it replaces stays public, unless it has expired."""
    before, now = memory.checkpoints.get(record.path), datetime.now(UTC)
    expired = before is not None and before.expires_at is not None and before.expires_at <= now
    public = before is not None and before.public and not expired
    _put(memory, replace(record, public=public or record.public))


def update(
    memory: Memory,
    path: str,
    change: Callable[[CheckpointRecord], CheckpointRecord],
    *,
    by: Mapping[str, str] | None = None,
) -> CheckpointRecord:
    found = memory.checkpoint(path)
    changed = replace(found, public=(new := change(found)).public, expires_at=new.expires_at)
    memory.checkpoints[path] = changed
    for event, details in changes_of(found, changed):
        _note(memory, found, event, by, **details)
    return changed


def delete(memory: Memory, path: str, *, by: Mapping[str, str] | None = None) -> CheckpointRecord:
    found = memory.checkpoint(path)
    _note(memory, found, "checkpoint_delete", by)
    del memory.checkpoints[path]
    memory.deleted_checkpoints[path] = found, datetime.now(UTC)
    return found


def delete_version(memory: Memory, read: CheckpointRecord, *, by: Mapping[str, str] | None = None) -> CheckpointRecord:
    if not memory.checkpoint(read.path).is_version(read):
        raise refusals.version_gone(read)
    return delete(memory, read.path, by=by)


def deleted(memory: Memory, path: str) -> CheckpointRecord:
    if path not in memory.deleted_checkpoints:
        raise refusals.no_checkpoint(path)
    return memory.deleted_checkpoints[path][0]


def expired(memory: Memory, now: datetime) -> list[CheckpointRecord]:
    return [each for each in memory.checkpoints.values() if each.expires_at and each.expires_at <= now]


def prune_deleted(memory: Memory, deleted_before: datetime) -> None:
    known = memory.deleted_checkpoints.items()
    memory.deleted_checkpoints = {path: each for path, each in known if each[1] >= deleted_before}


def _of_tenant(memory: Memory, tenant: str | None) -> list[CheckpointRecord]:
    return [each for each in memory.checkpoints.values() if tenant in (None, each.tenant)]


def _newest_first(records: Iterable[CheckpointRecord], before: Position | None = None) -> list[CheckpointRecord]:
    return newest_first(records, lambda each: (each.created_at, each.path), before)


def _put(memory: Memory, record: CheckpointRecord) -> None:
    if (before := memory.checkpoints.get(record.path)) is None or before.directory != record.directory:
        _note(memory, record, "checkpoint_create")
    memory.deleted_checkpoints.pop(record.path, None)
    memory.checkpoints[record.path] = record


def _note(
    memory: Memory, record: CheckpointRecord, event: str, by: Mapping[str, str] | None = None, **details: str
) -> None:
    about = {"tinker_path": record.path, "model_id": record.model_id, **details}
    audit.note(memory, record.tenant, event, by, **about)
