"""What live runs wait for at this moment, in a line each: for the page, the API and commands."""

from collections import defaultdict
from collections.abc import Mapping, Set
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Literal

from tinsmith.errors import NotFoundError, ResultExpiredError
from tinsmith.protocol import wire
from tinsmith.server.kept import Engines
from tinsmith.server.waiting_reasons import Kind, compiles, percent, reason_of, with_causes
from tinsmith.settings import QuotaSettings
from tinsmith.store import (
    SILENCE,
    EngineRecord,
    OperationRecord,
    OperationState,
    RequestStore,
    RunRecord,
    RunState,
    SessionRecord,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Wait:
    kind: Kind | Literal["client"]
    text: str
    since: datetime


@dataclass(frozen=True, slots=True, kw_only=True)
class Waits:
    """The waits of all live runs, read together."""

    by_run: Mapping[str, Wait] = field(default_factory=dict)
    engines: Mapping[str, EngineRecord] = field(default_factory=dict)

    def of(self, run: RunRecord, session: SessionRecord, *, operator: bool) -> wire.WaitsFor | None:
        """Return None for a run that has ended. `operator`: who may read the causes of failures."""
        wait = self.by_run.get(run.model_id)
        if wait is None or session.ended is not None:
            return None
        now, text = datetime.now(UTC), wait.text
        if wait.kind == "client":
            if run.state is RunState.PARKED:
                text += "; until then, the model is parked"
            if session.last_seen_at < now - SILENCE:
                text += "; no heartbeat has come from it for more than 30 s"
        return wire.WaitsFor(
            kind=wait.kind,
            text=with_causes(text, self.engines.values(), operator=operator),
            since_s=max(0.0, (now - wait.since).total_seconds()),  # the engine's clock may be ahead
        )


async def read_waits(store: RequestStore, quotas: QuotaSettings, engines: Engines | None = None) -> Waits:
    """Read the waits of all live runs. What this takes grows with their number and with what is pending."""
    records = await (engines or Engines(store)).records()
    running = defaultdict[str, set[str]](set)  # tenants, by base model
    for each in await store.list_pending():
        if each.state is OperationState.RUNNING:
            running[each.base_model].add(each.tenant)
    by_run: dict[str, Wait] = {}
    for model_id, following in (await store.next_requests()).items():
        if isinstance(following, datetime):
            by_run[model_id] = _of_client(following)
        elif (operation := await _found(store, following)) is None:
            by_run[model_id] = _of_client(datetime.now(UTC))
        else:
            reason = await reason_of(operation, store, records, quotas)
            others, engine = running[operation.base_model] - {operation.tenant}, records.get(operation.base_model)
            text = reason.text
            if reason.kind in {"run", "compile"}:
                text += _beside(others)
            elif reason.kind == "queue":
                text = f"{operation.kind}: {text}{_beside(others)}{_compiling(engine)}"
            by_run[model_id] = Wait(kind=reason.kind, text=text, since=operation.started_at or operation.created_at)
    return Waits(by_run=by_run, engines=records)


def _of_client(since: datetime) -> Wait:
    return Wait(kind="client", text="nothing is pending, so it is the client's turn", since=since)


async def _found(store: RequestStore, request_id: str) -> OperationRecord | None:
    """Return an operation that was pending, unless it has finished meanwhile."""
    try:
        operation = await store.get_operation(request_id)
    except (NotFoundError, ResultExpiredError):
        return None
    return None if operation.state.is_finished else operation


def _beside(others: Set[str]) -> str:
    """Name no tenant: one of the others may read it."""
    return "; the engine runs other tenants' requests as well" if others else ""


def _compiling(engine: EngineRecord | None) -> str:
    return f"; the engine is {engine.detail}{percent(engine)}" if engine is not None and compiles(engine) else ""
