"""Which runs came from which, as the page, the API and `tinsmith runs show` tell it."""

from collections.abc import Mapping, Sequence
from typing import Final

from tinsmith.errors import NotFoundError
from tinsmith.protocol import wire
from tinsmith.store import CheckpointRecord, Origin, RequestStore, RunRecord, SessionRecord

_MOST_RUNS: Final = 200
_MOST_CHECKPOINTS: Final = 200


async def lineage_of(store: RequestStore, run: RunRecord, tenant: str | None) -> wire.Lineage:
    """Follow the origins of a run, both ways, through the runs of a tenant, or of all."""
    runs, origins, complete = await _family(store, run, tenant)
    sessions = await store.find_sessions({each.session_id for each in runs.values()})
    saved, number = await store.list_checkpoints(None, model_id=run.model_id, limit=_MOST_CHECKPOINTS)
    return wire.Lineage(
        run_id=run.model_id,
        runs=[
            _run(each, sessions.get(each.session_id), origins, runs)
            for each in sorted(runs.values(), key=lambda each: (each.created_at, each.model_id))
        ],
        complete=complete,
        checkpoints=[saved_checkpoint(each) for each in saved],
        num_checkpoints=number,
    )


async def _family(
    store: RequestStore, run: RunRecord, tenant: str | None
) -> tuple[dict[str, RunRecord], list[Origin], bool]:
    """Return the connected runs by id, their origins, and whether these are all."""
    known, seen, found = {run.model_id: run}, {run.model_id}, dict[tuple[str, int], Origin]()
    front = [run.model_id]
    while front:
        near = [*await store.origins_of(front), *await store.derived_from(front)]
        found |= {(each.model_id, each.seq_id): each for each in near}
        beside = dict.fromkeys(model_id for each in near for model_id in (each.source_id, each.model_id))
        front = []
        for model_id in beside.keys() - seen:
            seen.add(model_id)
            other = await _find(store, model_id)
            if other is None or tenant not in (None, other.tenant):
                continue
            if len(known) == _MOST_RUNS:
                return known, list(found.values()), False
            known[model_id] = other
            front.append(model_id)
    return known, list(found.values()), True


async def _find(store: RequestStore, model_id: str) -> RunRecord | None:
    try:
        return await store.get_run(model_id)
    except NotFoundError:  # it was deleted with its session; what came of it remains
        return None


def _run(
    run: RunRecord, session: SessionRecord | None, origins: Sequence[Origin], known: Mapping[str, RunRecord]
) -> wire.LineageRun:
    own = sorted((each for each in origins if each.model_id == run.model_id), key=lambda each: each.seq_id)
    return wire.LineageRun(
        run_id=run.model_id,
        name=None if session is None else session.display_name,
        base_model=run.base_model,
        state=run.state.value,
        state_reason=run.state_reason,
        steps=run.steps,
        created_at=run.created_at,
        origins=[
            wire.LineageOrigin(
                path=each.path,
                source=each.source_id if each.source_id in known else None,
                seq_id=each.seq_id,
                step=each.step,
                created_at=each.created_at,
            )
            for each in own
        ],
    )


def saved_checkpoint(record: CheckpointRecord) -> wire.SavedCheckpoint:
    return wire.SavedCheckpoint(
        path=record.path,
        kind=record.kind,
        size_bytes=record.size_bytes,
        created_at=record.created_at,
        step=record.step,
        public=record.public,
        expires_at=record.expires_at,
    )
