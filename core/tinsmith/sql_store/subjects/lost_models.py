"""Models whose state cannot be created or rebuilt."""

from tinsmith.operations import Failed
from tinsmith.sql_store.subjects import leases, log, recovery_points, submitting
from tinsmith.sql_store.subjects.transaction import Transaction
from tinsmith.sql_store.tables import RunRow
from tinsmith.store import Lease, RunState


def lose(tx: Transaction, lease: Lease, model_id: str, reason: str) -> None:
    leases.fence(tx, lease)
    run = log.locked_run(tx.session, model_id)
    if run is not None and run.state in log.LIVE:
        mark_lost(tx, run, reason)


def mark_lost(tx: Transaction, run: RunRow, reason: str, failure: Failed | None = None) -> None:
    """Fail what is pending as well; the caller has locked the run."""
    run.state, run.state_reason = RunState.LOST, reason
    recovery_points.drop_all(tx.session, run.model_id)
    tx.wake.append(log.places_topic(run.base_model))
    log.fail_pending(tx, run.model_id, failure or submitting.lost(run.model_id, reason))


def note(tx: Transaction, lease: Lease, model_id: str, note: str) -> None:
    leases.fence(tx, lease)
    run = log.locked_run(tx.session, model_id)
    if run is not None and run.state in log.LIVE:
        run.state_reason = note
