"""Which runs took their weights from which checkpoints."""

from collections.abc import Collection

from sqlalchemy import Connection

from tinsmith.sql_store.statements import Change, Query, fields_of, insert_into, values_of
from tinsmith.store import Origin

_PUT = Change(f"{insert_into('origins', *fields_of(Origin))} ON CONFLICT (model_id, seq_id) DO NOTHING")
_ORDER = "ORDER BY created_at, model_id, seq_id"
_OF = Query(f"SELECT FIELDS FROM origins WHERE model_id IN :models {_ORDER}", Origin)
_FROM = Query(f"SELECT FIELDS FROM origins WHERE source_id IN :models {_ORDER}", Origin)
DELETE_OF_DELETED = Change(
    "DELETE FROM origins WHERE model_id IN :keys "
    "AND NOT EXISTS (SELECT 1 FROM runs WHERE runs.model_id = origins.model_id)"
)


def keep(connection: Connection, origin: Origin) -> None:
    _PUT.run(connection, **values_of(origin))


def of_runs(connection: Connection, model_ids: Collection[str]) -> list[Origin]:
    return _OF.all(connection, models=list(model_ids)) if model_ids else []


def derived_from(connection: Connection, model_ids: Collection[str]) -> list[Origin]:
    return _FROM.all(connection, models=list(model_ids)) if model_ids else []
