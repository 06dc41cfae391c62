"""What people and programs read of runs: the same for the page, for the API, and for `tinsmith runs`."""

from tinsmith.protocol import wire
from tinsmith.store import MetricsRow, RequestStore, RunRecord, SessionRecord

_PAGE = 2000  # rows of one read


async def list_summaries(store: RequestStore, tenant: str | None, *, limit: int, offset: int) -> wire.RunSummaries:
    """List runs of a tenant, or of all, newest first."""
    runs, total = await store.list_runs(tenant, limit=limit, offset=offset)
    sessions = await store.find_sessions({run.session_id for run in runs})
    found = [(run, sessions.get(run.session_id)) for run in runs]
    return wire.RunSummaries(  # without the runs that were deleted with their session meanwhile
        runs=[_summary(run, session) for run, session in found if session is not None],
        cursor=wire.Cursor(offset=offset, limit=limit, total_count=total),
    )


def _summary(run: RunRecord, session: SessionRecord) -> wire.RunSummary:
    return wire.RunSummary(
        run_id=run.model_id,
        base_model=run.base_model,
        tenant=run.tenant,
        state=run.state.value,
        state_reason=run.state_reason,
        lora_rank=run.lora.rank,
        steps=run.steps,
        created_at=run.created_at,
        last_request_at=run.last_request_at,
        name=session.display_name,
        project_id=session.project_id,
        tags=list(session.tags),
        user_metadata=wire.as_text(run.user_metadata),
        ended=session.ended,
    )


async def read_measured(store: RequestStore, model_id: str, from_step: int = 0) -> list[MetricsRow]:
    """Return all rows of a run's metrics from a step on."""
    rows: list[MetricsRow] = []
    page = await store.read_metrics(model_id, from_step=from_step, limit=_PAGE)
    while page:
        rows += page
        last = page[-1]
        if len(page) < _PAGE:
            break
        page = await store.read_metrics(model_id, from_step=last.step, after=last.seq_id, limit=_PAGE)
    return rows
