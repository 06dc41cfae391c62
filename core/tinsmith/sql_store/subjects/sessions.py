"""Clients' sessions: their beginning, their heartbeats, and their end, which unloads their models."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Final

from sqlalchemy import Connection

from tinsmith.errors import UserError
from tinsmith.failpoints import durable_boundary
from tinsmith.operations import UnloadModel
from tinsmith.sql_store.connections import Connections
from tinsmith.sql_store.group_commit import Call, Failure, Grouping, Writer, locks
from tinsmith.sql_store.statements import Change, Query, fields_of, insert_into, query, values_of, walked, wanted
from tinsmith.sql_store.subjects import audit, gaps, log, models, submitting
from tinsmith.sql_store.subjects.models import Run
from tinsmith.sql_store.transaction import Transaction, the_model
from tinsmith.store import SILENCE, NewOperation, SessionEnd, SessionRecord
from tinsmith.store.audit import moved
from tinsmith.store.codec import encode_operation, kind_of
from tinsmith.store.refusals import described_bytes, lost, missing, refuse_large_metadata, unloaded
from tinsmith.store.wakeups import work_topic

_PAUSE_S: Final = 0.02  # for which heartbeats gather after a transaction
_MOST: Final = 256  # heartbeats in one transaction

_OPEN = "sessions.ended IS NULL"
_GET = Query("SELECT FIELDS FROM sessions WHERE session_id = :wanted", SessionRecord)
_LOCK = Query(f"{_GET.text} FOR UPDATE", SessionRecord)
_FIND = Query("SELECT FIELDS FROM sessions WHERE session_id IN :ids", SessionRecord)
_SAME = Query("SELECT FIELDS FROM sessions WHERE tenant = :tenant AND idempotency_key = :key", SessionRecord)
INSERT = Change(insert_into("sessions", *fields_of(SessionRecord), "idempotency_key", "heard_since", "described_bytes"))
_TOUCH = Change(
    "UPDATE sessions SET heard_since = CASE WHEN last_seen_at < :silent_since THEN :at ELSE heard_since END, "
    "heard_by = CASE WHEN last_seen_at < :at THEN :server ELSE heard_by END, "
    "last_seen_at = CASE WHEN last_seen_at < :at THEN :at ELSE last_seen_at END "
    "WHERE session_id = :wanted AND sessions.ended IS NULL"
)
NUM_LIVE = Query(f"SELECT count(*) FROM sessions WHERE tenant = :tenant AND {_OPEN}", int)
_LIVE_MODELS = Query(
    f"SELECT model_id FROM runs WHERE session_id = :session AND {models.IS_LIVE} ORDER BY model_id", str
)
_MOVE = Change("UPDATE sessions SET project_id = :project WHERE session_id = :wanted")
_END = Change("UPDATE sessions SET ended = :reason, end_detail = :detail WHERE session_id = :wanted")


def create(
    tx: Transaction, session: SessionRecord, *, idempotency_key: str | None, by: Mapping[str, str] | None = None
) -> SessionRecord:
    refuse_large_metadata(session.user_metadata)
    if idempotency_key is not None:
        first = _SAME.first(tx.connection, tenant=session.tenant, key=idempotency_key)
        if first is not None:
            return first
    more = {"heard_since": session.created_at, "described_bytes": described_bytes(*session.described)}
    INSERT.run(tx.connection, **values_of(session), **more, idempotency_key=idempotency_key)
    audit.note_audit(tx, session.tenant, "session_create", by, session_id=session.session_id)
    return session


def get(connection: Connection, session_id: str, *, lock: bool = False) -> SessionRecord:
    found = (_LOCK if lock else _GET).first(connection, wanted=session_id)
    if found is None:
        raise missing("session", session_id)
    return found


def find(connection: Connection, session_ids: Collection[str]) -> dict[str, SessionRecord]:
    return {each.session_id: each for each in _FIND.all(connection, ids=list(session_ids))}


def list_all(connection: Connection, tenant: str | None, *, limit: int, offset: int) -> list[SessionRecord]:
    conditions, values = wanted(tenant=tenant)
    where = f"FROM sessions WHERE TRUE{conditions}"
    page = f"SELECT FIELDS {where} ORDER BY created_at DESC, session_id DESC LIMIT :at_most OFFSET :offset"
    return query(page, SessionRecord).all(connection, **values, at_most=limit, offset=offset)


def walk(
    connection: Connection, tenant: str | None, *, before: tuple[datetime, str] | None = None, limit: int
) -> list[SessionRecord]:
    end, values = walked("session_id", before, tenant=tenant)
    page = f"SELECT FIELDS FROM sessions WHERE TRUE{end}"
    return query(page, SessionRecord).all(connection, **values, at_most=limit)


@dataclass(frozen=True, slots=True)
class Heartbeat:
    session_id: str
    at: datetime
    server_id: str | None  # which server heard it


def touch_all(tx: Transaction, heartbeats: Sequence[Heartbeat]) -> list[SessionRecord | None]:
    """Record heartbeats, and return their sessions, None for an unknown one.

    Each of a thousand clients sends one every ten seconds. Servers that hear the same sessions lock their rows in one
    order.
    """
    changes = [
        {"wanted": each.session_id, "at": each.at, "server": each.server_id, "silent_since": each.at - SILENCE}
        for each in sorted(heartbeats, key=lambda each: each.session_id)
    ]
    _TOUCH.run_each(tx.connection, changes)
    return [_GET.first(tx.connection, wanted=each.session_id) for each in heartbeats]


class Heartbeats(Grouping[Writer[Transaction]]):
    """Records heartbeats some at a time: a transaction takes longer than the heartbeats in it.

    A transaction that fails fails all heartbeats in it.
    """

    def __init__(self, writer: Writer[Transaction], *, pause_s: float = _PAUSE_S) -> None:
        super().__init__([writer], max_group=_MOST, pause_s=pause_s)

    async def record(self, heartbeat: Heartbeat) -> SessionRecord:
        """Return the session once the heartbeat is committed. Raises NotFoundError if there is none."""
        session: SessionRecord = await self.ask(Call(touch_all, (heartbeat,), {}))
        return session

    async def _run(self, connection: Writer[Transaction], calls: list[Call]) -> list[SessionRecord | Failure]:
        heartbeats = [heartbeat for call in calls for heartbeat in call.args]
        found = zip(heartbeats, await connection.write(touch_all, heartbeats), strict=True)
        return [session or Failure(missing("session", heartbeat.session_id)) for heartbeat, session in found]


def update(
    tx: Transaction, session_id: str, *, project_id: str | None, by: Mapping[str, str] | None = None
) -> SessionRecord:
    session = get(tx.connection, session_id, lock=True)
    if session.project_id != project_id:
        _MOVE.run(tx.connection, wanted=session_id, project=project_id)
        audit.note_audit(tx, session.tenant, "project_move", by, **moved(session, project_id))
    return replace(session, project_id=project_id)


_UNLOAD = Query("SELECT request_id FROM operations WHERE subject_id = :model AND seq_id = :seq_id", str)


@durable_boundary("store.end_session")
async def end_session(
    connections: Connections,
    session_id: str,
    reason: SessionEnd,
    detail: str | None,
    *,
    by: Mapping[str, str] | None = None,
) -> SessionRecord:
    ended = await connections.durable.write(end, session_id, reason, detail, by=by)
    await _fail_what_is_left(connections, session_id)
    return ended


def _models_to_end(connection: Connection, session_id: str, *_: object, **_more: object) -> list[str]:
    return _LIVE_MODELS.all(connection, session=session_id)


async def _fail_what_is_left(connections: Connections, session_id: str) -> None:
    """If this process dies before the end, `fail_gaps` of the engine goes on."""
    for model_id in await connections.reader.read(gaps.left_by, session_id):
        await gaps.fail_in_chunks(connections, model_id, None)


@locks(_models_to_end)
def end(
    tx: Transaction, session_id: str, reason: SessionEnd, detail: str | None, *, by: Mapping[str, str] | None = None
) -> SessionRecord:
    session = get(tx.connection, session_id, lock=True)
    if session.ended is not None:
        return session
    _END.run(tx.connection, wanted=session_id, reason=reason, detail=detail)
    audit.note_audit(tx, session.tenant, "session_end", by, session_id=session_id, reason=reason)
    for model_id in _models_to_end(tx.connection, session_id):
        run = models.locked(tx.connection, model_id)
        assert run is not None
        if run.unload_seq_id is None:
            _unload(tx, run)
    return replace(session, ended=reason, end_detail=detail)


async def unload_run(connections: Connections, model_id: str) -> str:
    request_id = await connections.durable.write(unload, model_id)
    await gaps.fail_in_chunks(connections, model_id, None)
    return request_id


@locks(the_model)
def unload(tx: Transaction, model_id: str) -> str:
    run = models.locked(tx.connection, model_id)
    if run is None:
        raise missing("model", model_id)
    if run.unload_seq_id is not None:
        before = _UNLOAD.first(tx.connection, model=model_id, seq_id=run.unload_seq_id)
        if before is None:  # its result is no longer kept
            raise unloaded(model_id)
        return before
    if not run.is_live:
        raise UserError(lost(model_id, run.state_reason).message)
    return _unload(tx, run)


def _unload(tx: Transaction, run: Run) -> str:
    """Queue an UnloadModel behind the last operation that can run. Return its request_id.

    Later requests are refused, so a gap will never be filled: the UnloadModel takes its seq_id, and later operations
    fail (`gaps.fail_some`). A model that waits for a place runs its accepted operations when it has one.
    """
    run.unload_seq_id = _first_missing(tx, run)
    unload = UnloadModel(model_id=run.model_id)
    operation = NewOperation(
        base_model=run.base_model,
        kind=kind_of(unload),
        tenant=run.tenant,
        session_id=run.session_id,
        subject_id=run.model_id,
        seq_id=run.unload_seq_id,
        ordered=True,
        payload=encode_operation(unload),
        digest=b"",
    )
    request_id = submitting.insert(tx, operation, run, submitting.neighbours(tx.connection, operation))
    models.write(tx.connection, run)
    tx.wake.append(work_topic(run.base_model))
    return request_id


def _first_missing(tx: Transaction, run: Run) -> int:
    """While a gap is being failed, what is before `next_seq_id` does not count."""
    first = 0 if run.waits_for_place else max(run.arrived_seq_id + 1, run.next_seq_id)
    return submitting.last_before_a_gap(tx.connection, run, first) + 1


async def expire_sessions(
    connections: Connections, last_seen_before: datetime, *, heard_by: str | None = None
) -> list[str]:
    expired = []
    for session_id in await connections.reader.read(silent, last_seen_before, heard_by):
        if await connections.durable.write(expire, session_id, last_seen_before):
            await _fail_what_is_left(connections, session_id)
            expired.append(session_id)
    return expired


def silent(connection: Connection, last_seen_before: datetime, server_id: str | None) -> list[str]:
    """Return the open sessions without a heartbeat since then: all, or those that one of several servers heard last."""
    conditions, values = wanted(heard_by=server_id if log.locks_rows(connection) else None)
    silent = f"SELECT session_id FROM sessions WHERE {_OPEN} AND last_seen_at < :before{conditions}"
    in_order = query(f"{silent} ORDER BY last_seen_at, session_id", str)
    return in_order.all(connection, before=last_seen_before, **values)


@locks(_models_to_end)
def expire(tx: Transaction, session_id: str, last_seen_before: datetime) -> bool:
    """End a session, unless it has ended or been heard meanwhile. Return whether it was ended."""
    session = get(tx.connection, session_id, lock=True)
    if session.ended is not None or session.last_seen_at >= last_seen_before:
        return False
    end(tx, session_id, "expired", f"no heartbeat since {session.last_seen_at:%Y-%m-%d %H:%M:%S} UTC")
    return True
