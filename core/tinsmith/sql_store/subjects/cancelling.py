"""Cancelling samples, and telling their engine."""

from sqlalchemy import Connection

from tinsmith.operations import Failed
from tinsmith.sql_store.statements import Change, Query
from tinsmith.sql_store.subjects import leases, log
from tinsmith.sql_store.subjects.transaction import Connections, Transaction
from tinsmith.store import Lease, OperationRecord, OperationState

_UNTOLD = f"{log.OPERATION} WHERE base_model = :base_model AND NOT operations.cancel_told ORDER BY id"
_ALL_UNTOLD, _ANY_UNTOLD = Query(f"{_UNTOLD} FOR UPDATE", log.Operation), Query(f"{_UNTOLD} LIMIT 1", log.Operation)
_TELL = Change("UPDATE operations SET cancel_told = :told WHERE id = :key")


def cancel(tx: Transaction, request_id: str) -> OperationRecord:
    operation = log.find(tx.connection, request_id, lock=True)
    if not operation.ordered and operation.state not in log.FINISHED:
        log.finish(tx, operation, Failed(message="cancelled by the client"), OperationState.CANCELLED)
        if operation.state == OperationState.RUNNING:
            _TELL.run(tx.connection, key=operation.id, told=False)
            tx.wake.append(log.work_topic(operation.base_model))
    return log.get(tx.connection, request_id)


async def cancelled(connections: Connections, lease: Lease) -> list[str]:
    if not await connections.reader.read(any_untold, lease.base_model):
        return []
    return await connections.relaxed.write(tell, lease)


def any_untold(connection: Connection, base_model: str) -> bool:
    """Look without writing, so that an engine without cancelled operations costs no transaction."""
    return _ANY_UNTOLD.first(connection, base_model=base_model) is not None


def tell(tx: Transaction, lease: Lease) -> list[str]:
    leases.fence(tx, lease)
    untold = _ALL_UNTOLD.all(tx.connection, base_model=lease.base_model)
    _TELL.run_each(tx.connection, [{"key": each.id, "told": True} for each in untold])
    return [each.request_id for each in untold]
