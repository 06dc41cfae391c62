"""Links by which others read the curves of a run. They are deleted with it."""

from collections.abc import Mapping

from sqlalchemy import Connection

from tinsmith.sql_store.group_commit import locks
from tinsmith.sql_store.statements import Change, Query, fields_of, insert_into, values_of
from tinsmith.sql_store.subjects import audit
from tinsmith.sql_store.transaction import Transaction
from tinsmith.store import ShareLink
from tinsmith.store.refusals import missing

_INSERT = Change(insert_into("share_links", *fields_of(ShareLink)))
_TENANT = Query("SELECT tenant FROM runs WHERE model_id = :model", str)
_FIND = Query("SELECT FIELDS FROM share_links WHERE digest = :digest", ShareLink)
_LIST = Query("SELECT FIELDS FROM share_links WHERE model_id = :model ORDER BY created_at, share_id", ShareLink)
_DELETE = Change("DELETE FROM share_links WHERE model_id = :model AND share_id = :share")
DELETE_OF_DELETED = Change(
    "DELETE FROM share_links WHERE model_id IN :keys "
    "AND NOT EXISTS (SELECT 1 FROM runs WHERE runs.model_id = share_links.model_id)"
)


def _of_link(_: Connection, link: ShareLink, **_more: object) -> list[str]:
    return [link.model_id]


@locks(_of_link)
def add(tx: Transaction, link: ShareLink, *, by: Mapping[str, str] | None = None) -> None:
    tenant = _TENANT.first(tx.connection, model=link.model_id)
    if tenant is None:
        raise missing("model", link.model_id)
    _INSERT.run(tx.connection, **values_of(link))
    audit.note(tx, tenant, "share_link_create", by, model_id=link.model_id, share_id=link.share_id)


def find(connection: Connection, digest: str) -> ShareLink | None:
    return _FIND.first(connection, digest=digest)


def of_run(connection: Connection, model_id: str) -> list[ShareLink]:
    return _LIST.all(connection, model=model_id)


def delete(tx: Transaction, model_id: str, share_id: str, *, by: Mapping[str, str] | None = None) -> bool:
    tenant = _TENANT.first(tx.connection, model=model_id)
    if tenant is None or _DELETE.run(tx.connection, model=model_id, share=share_id) == 0:
        return False
    audit.note(tx, tenant, "share_link_delete", by, model_id=model_id, share_id=share_id)
    return True
