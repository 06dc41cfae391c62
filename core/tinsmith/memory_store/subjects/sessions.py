"""Clients' sessions: their beginning, their heartbeats, and their end, which unloads their models."""

from collections.abc import Collection, Mapping
from dataclasses import replace
from datetime import datetime

from tinsmith.errors import UserError
from tinsmith.memory_store.memory import Memory
from tinsmith.memory_store.rows import Run, Session, newest_first
from tinsmith.memory_store.subjects import audit, gaps, submitting
from tinsmith.operations import UnloadModel
from tinsmith.store import SILENCE, NewOperation, Position, SessionEnd, SessionRecord, refusals
from tinsmith.store.audit import moved
from tinsmith.store.codec import encode_operation, kind_of
from tinsmith.store.refusals import refuse_large_metadata
from tinsmith.store.wakeups import work_topic


def create(
    memory: Memory, session: SessionRecord, *, idempotency_key: str | None, by: Mapping[str, str] | None = None
) -> SessionRecord:
    refuse_large_metadata(session.user_metadata)
    key = session.tenant, idempotency_key
    for each in memory.sessions.values() if idempotency_key is not None else ():
        if (each.record.tenant, each.idempotency_key) == key:
            return each.record
    memory.sessions[session.session_id] = Session(session, idempotency_key, session.created_at)
    audit.note(memory, session.tenant, "session_create", by, session_id=session.session_id)
    return session


def get(memory: Memory, session_id: str) -> SessionRecord:
    return memory.session(session_id).record


def find(memory: Memory, session_ids: Collection[str]) -> dict[str, SessionRecord]:
    return {each: memory.sessions[each].record for each in session_ids if each in memory.sessions}


def list_all(memory: Memory, tenant: str | None, *, limit: int, offset: int) -> list[SessionRecord]:
    return _newest_first(memory, tenant)[offset : offset + limit]


def walk(memory: Memory, tenant: str | None, *, before: Position | None = None, limit: int) -> list[SessionRecord]:
    return _newest_first(memory, tenant, before)[:limit]


def _newest_first(memory: Memory, tenant: str | None, before: Position | None = None) -> list[SessionRecord]:
    found = [each.record for each in memory.sessions.values() if tenant in (None, each.record.tenant)]
    return newest_first(found, lambda each: (each.created_at, each.session_id), before)


def count_live(memory: Memory, tenant: str) -> int:
    sessions = (each.record for each in memory.sessions.values())
    return sum(each.tenant == tenant and each.ended is None for each in sessions)


def hear(memory: Memory, session_id: str, at: datetime, *, server_id: str | None = None) -> SessionRecord:
    session = memory.session(session_id)
    if session.record.ended is None:
        if session.record.last_seen_at < at - SILENCE:
            session.heard_since = at
        if session.record.last_seen_at < at:
            session.record = replace(session.record, last_seen_at=at, heard_by=server_id)
    return session.record


def update(
    memory: Memory, session_id: str, *, project_id: str | None, by: Mapping[str, str] | None = None
) -> SessionRecord:
    session = memory.session(session_id)
    if session.record.project_id != project_id:
        audit.note(memory, session.record.tenant, "project_move", by, **moved(session.record, project_id))
    session.record = replace(session.record, project_id=project_id)
    return session.record


def end(
    memory: Memory, session_id: str, reason: SessionEnd, detail: str | None, *, by: Mapping[str, str] | None = None
) -> SessionRecord:
    session = memory.session(session_id)
    if session.record.ended is None:
        audit.note(memory, session.record.tenant, "session_end", by, session_id=session_id, reason=reason)
        session.record = replace(session.record, ended=reason, end_detail=detail)
        for run in [each for each in memory.runs.values() if each.record.session_id == session_id]:
            if run.is_live:
                _unload(memory, run)
            gaps.fail(memory, run, None)
    return session.record


def expire(memory: Memory, last_seen_before: datetime, *, heard_by: str | None = None) -> list[str]:
    del heard_by  # no other server shares this store
    open_ones = [each.record for each in memory.sessions.values() if each.record.ended is None]
    expired = [each for each in open_ones if each.last_seen_at < last_seen_before]
    for each in expired:
        end(memory, each.session_id, "expired", f"no heartbeat since {each.last_seen_at:%Y-%m-%d %H:%M:%S} UTC")
    return [each.session_id for each in expired]


def unload(memory: Memory, model_id: str) -> str:
    run = memory.run(model_id)
    if run.unload is None and not run.is_live:
        raise UserError(refusals.lost(model_id, run.record.state_reason).message)
    request_id = _unload(memory, run)
    gaps.fail(memory, run, None)
    return request_id


def _unload(memory: Memory, run: Run) -> str:
    """Queue an UnloadModel under the first missing seq_id, and return its request_id; of a repeat, the first one's.

    Nothing fills that gap, so what is behind it fails.
    """
    rows = memory.log(run.record.model_id)
    if run.unload is not None:
        if run.unload not in rows:  # its result is no longer kept
            raise refusals.unloaded(run.record.model_id)
        return rows[run.unload].record.request_id
    run.unload = 0 if run.waits_for_place else max(run.arrived + 1, run.record.next_seq_id)
    while run.unload in rows:
        run.unload += 1
    unload = UnloadModel(model_id=run.record.model_id)
    operation = NewOperation(
        base_model=run.record.base_model,
        kind=kind_of(unload),
        tenant=run.record.tenant,
        session_id=run.record.session_id,
        subject_id=run.record.model_id,
        seq_id=run.unload,
        ordered=True,
        payload=encode_operation(unload),
        digest=b"",
    )
    row = submitting.insert(memory, operation, run, payload=operation.payload)
    memory.told.append(work_topic(run.record.base_model))
    return row.record.request_id
