"""Links by which others read the curves of a run. They are deleted with it."""

from sqlalchemy import Connection

from tinsmith.sql_store.group_commit import locks
from tinsmith.sql_store.statements import Change, Query, fields_of, insert_into, values_of
from tinsmith.sql_store.transaction import Transaction
from tinsmith.store import ShareLink
from tinsmith.store.refusals import missing

_INSERT = Change(insert_into("share_links", *fields_of(ShareLink)))
_RUN = Query("SELECT model_id FROM runs WHERE model_id = :model", str)
_FIND = Query("SELECT FIELDS FROM share_links WHERE digest = :digest", ShareLink)
_LIST = Query("SELECT FIELDS FROM share_links WHERE model_id = :model ORDER BY created_at, share_id", ShareLink)
_DELETE = Change("DELETE FROM share_links WHERE model_id = :model AND share_id = :share")
DELETE_OF_DELETED = Change(
    "DELETE FROM share_links WHERE model_id IN :keys "
    "AND NOT EXISTS (SELECT 1 FROM runs WHERE runs.model_id = share_links.model_id)"
)


def _of_link(_: Connection, link: ShareLink) -> list[str]:
    return [link.model_id]


@locks(_of_link)
def add(tx: Transaction, link: ShareLink) -> None:
    if _RUN.first(tx.connection, model=link.model_id) is None:
        raise missing("model", link.model_id)
    _INSERT.run(tx.connection, **values_of(link))


def find(connection: Connection, digest: str) -> ShareLink | None:
    return _FIND.first(connection, digest=digest)


def of_run(connection: Connection, model_id: str) -> list[ShareLink]:
    return _LIST.all(connection, model=model_id)


def delete(tx: Transaction, model_id: str, share_id: str) -> bool:
    return _DELETE.run(tx.connection, model=model_id, share=share_id) > 0
