"""How many bytes tenants keep, by what they are. Each sum reads an index, or rows that are counted as they change."""

from collections import defaultdict
from typing import Any

import sqlalchemy
from sqlalchemy import Column, Select, func
from sqlmodel import Session

from tinsmith.sql_store.tables import (
    CHECKPOINTS,
    KEPT,
    OPEN,
    PENDING_WORK,
    RECOVERY_POINTS,
    ROUTED_EXPERTS,
    RUNS,
    SAMPLING_SESSIONS,
    SESSIONS,
    SIZED,
)
from tinsmith.store import KeptBytes

_select, _sum = sqlalchemy.select, func.sum
_LOG = _select(PENDING_WORK.c.tenant, _sum(PENDING_WORK.c.stored_bytes))
_CHECKPOINTS = _select(CHECKPOINTS.c.tenant, _sum(CHECKPOINTS.c.size_bytes)).where(KEPT)
_SNAPSHOTS = (
    _select(SESSIONS.c.tenant, _sum(SAMPLING_SESSIONS.c.num_bytes))
    .join_from(SESSIONS, SAMPLING_SESSIONS, SAMPLING_SESSIONS.c.session_id == SESSIONS.c.session_id)
    .where(OPEN, SIZED)
)
_POINTS = _select(RUNS.c.tenant, _sum(RECOVERY_POINTS.c.size_bytes)).join_from(
    RECOVERY_POINTS, RUNS, RUNS.c.model_id == RECOVERY_POINTS.c.model_id
)
_EXPERTS = _select(ROUTED_EXPERTS.c.tenant, _sum(ROUTED_EXPERTS.c.num_bytes))
_SUMS: dict[str, tuple[Select[Any], Column[Any]]] = {
    "log": (_LOG, PENDING_WORK.c.tenant),
    "checkpoints": (_CHECKPOINTS, CHECKPOINTS.c.tenant),
    "snapshots": (_SNAPSHOTS, SESSIONS.c.tenant),
    "recovery_points": (_POINTS, RUNS.c.tenant),
    "routed_experts": (_EXPERTS, ROUTED_EXPERTS.c.tenant),
}


def kept(session: Session, tenant: str | None) -> list[KeptBytes]:
    """Return what a tenant keeps, or what each of them keeps, by name."""
    found: defaultdict[str, dict[str, int]] = defaultdict(dict)
    for what, (query, column) in _SUMS.items():
        of = query.group_by(column) if tenant is None else query.group_by(column).where(column == tenant)
        for row in session.connection().execute(of):
            found[row[0]][what] = int(row[1])
    return [KeptBytes(tenant=name, **sizes) for name, sizes in sorted(found.items())]
