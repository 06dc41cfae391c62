"""The audit log: who made, changed or deleted what. A tenant reads of its own, an administrator of everybody's."""

from datetime import UTC, date, datetime, time, timedelta
from typing import Annotated, Final, Literal

from fastapi import APIRouter, Query

from tinsmith.protocol import wire
from tinsmith.server.auth import Caller
from tinsmith.server.context import API_PREFIX, Context
from tinsmith.server.json_routes import JsonRoute
from tinsmith.store import AuditEntry

router = APIRouter(prefix=API_PREFIX, tags=["audit log"], route_class=JsonRoute)

_MOST: Final = 10_000


@router.get("/audit", response_model_exclude_none=True)
async def read_audit_log(
    caller: Caller,
    context: Context,
    event_type: Literal["all", "checkpoints", "projects", "teams", "organizations"] = "all",
    day: date | None = None,
    limit: Annotated[int, Query(ge=1, le=_MOST)] = _MOST,
    offset: Annotated[int, Query(ge=0, lt=2**31)] = 0,
) -> wire.AuditLog:
    """List the entries of a day in UTC, in order; today's without one. `next_offset` is there if more follow."""
    since = datetime.combine(day or context.now().date(), time.min, UTC)
    found = await context.store.read_audit(
        None if caller.admin else caller.tenant,
        since=since,
        until=since + timedelta(days=1),
        resource=None if event_type == "all" else event_type.removesuffix("s"),
        limit=limit + 1,
        offset=offset,
    )
    return wire.AuditLog(
        entries=[_shown(each) for each in found[:limit]], next_offset=offset + limit if len(found) > limit else None
    )


def _shown(entry: AuditEntry) -> wire.AuditLogEntry:
    details = dict(entry.details)
    return wire.AuditLogEntry(
        timestamp=entry.at,
        event=entry.event,
        event_details={"tenant": entry.tenant, **details},
        model_id=details.get("model_id"),
        tinker_path=details.get("tinker_path"),
    )
