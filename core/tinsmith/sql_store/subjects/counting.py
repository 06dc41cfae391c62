"""What a tenant has, for its quotas. Each query reads an index of what counts now, so history costs nothing."""

import sqlalchemy
from sqlalchemy import bindparam, func
from sqlmodel import Session

from tinsmith.sql_store.tables import (
    CHECKPOINTS,
    KEPT,
    LIVE,
    OPEN,
    OPERATIONS,
    QUEUED,
    RUNS,
    SAMPLING_SESSIONS,
    SESSIONS,
)
from tinsmith.store import KeptCheckpoints

_BEHIND = (
    sqlalchemy.select(OPERATIONS.c.id)
    .where(OPERATIONS.c.subject_id == bindparam("model"), OPERATIONS.c.seq_id > bindparam("seq_id"), QUEUED)
    .limit(1)
)
_MODELS = sqlalchemy.select(func.count()).select_from(RUNS).where(RUNS.c.tenant == bindparam("tenant"), LIVE)
_SESSIONS = sqlalchemy.select(func.count()).select_from(SESSIONS).where(SESSIONS.c.tenant == bindparam("tenant"), OPEN)
_SAMPLING_SESSIONS = (
    sqlalchemy.select(func.count())
    .select_from(SESSIONS)
    .join(SAMPLING_SESSIONS, SAMPLING_SESSIONS.c.session_id == SESSIONS.c.session_id)
    .where(SESSIONS.c.tenant == bindparam("tenant"), OPEN)
)
_KEPT = sqlalchemy.select(func.count(), func.coalesce(func.sum(CHECKPOINTS.c.size_bytes), 0)).where(
    CHECKPOINTS.c.tenant == bindparam("tenant"), KEPT
)


def is_awaited(session: Session, model_id: str, seq_id: int) -> bool:
    return session.connection().execute(_BEHIND, {"model": model_id, "seq_id": seq_id}).first() is not None


def live_models(session: Session, tenant: str) -> int:
    return int(session.connection().execute(_MODELS, {"tenant": tenant}).scalar_one())


def live_sessions(session: Session, tenant: str) -> int:
    return int(session.connection().execute(_SESSIONS, {"tenant": tenant}).scalar_one())


def open_sampling_sessions(session: Session, tenant: str) -> int:
    return int(session.connection().execute(_SAMPLING_SESSIONS, {"tenant": tenant}).scalar_one())


def kept_checkpoints(session: Session, tenant: str) -> KeptCheckpoints:
    number, num_bytes = session.connection().execute(_KEPT, {"tenant": tenant}).one()
    return KeptCheckpoints(number=number, num_bytes=int(num_bytes))
