"""The links and their table. A link is deleted with its run. Its secret is kept nowhere.

The secret is in the part of the link's URL that browsers send to no server, and in a header of the page's requests.
"""

import hashlib
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Final
from urllib.parse import urlencode

from sqlalchemy import Connection
from sqlmodel import Field

from tinsmith.errors import UserError
from tinsmith.store import RequestStore
from tinsmith.tables import (
    Change,
    Query,
    TableBase,
    Transaction,
    fields_of,
    id_of_run,
    insert_into,
    int64,
    locks,
    named_metadata,
    note_audit,
    tenant_of_run,
    values_of,
)

MOST_LINKS: Final = 100
"""To one run, expired ones as well: a list of them is one answer."""
_ID_BYTES: Final = 6
_SECRET_BYTES: Final = 24


class Table(TableBase):
    metadata = named_metadata()


class ShareLinks(Table, table=True):
    share_id: str = Field(primary_key=True)
    digest: str = Field(unique=True)
    model_id: str = id_of_run()
    created_at: int = int64()
    expires_at: int | None = int64(nullable=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class ShareLink:
    share_id: str
    digest: str  # SHA-256 of the secret, in hexadecimal digits
    model_id: str
    created_at: datetime
    expires_at: datetime | None = None

    def has_expired(self, now: datetime) -> bool:
        return self.expires_at is not None and self.expires_at <= now


_INSERT = Change(insert_into("share_links", *fields_of(ShareLink)))
_FIND = Query("SELECT FIELDS FROM share_links WHERE digest = :digest", ShareLink)
_LIST = Query("SELECT FIELDS FROM share_links WHERE model_id = :model ORDER BY created_at, share_id", ShareLink)
_NUMBER = Query("SELECT count(*) FROM share_links WHERE model_id = :model", int)
_DELETE = Change("DELETE FROM share_links WHERE model_id = :model AND share_id = :share")


async def make_link(
    store: RequestStore, model_id: str, *, lasts_s: float | None, by: Mapping[str, str] | None = None
) -> tuple[ShareLink, str]:
    """Keep a new link to a run, for ever or for so many seconds. Return it and its secret.

    Raises as `add` does.
    """
    now, secret = datetime.now(UTC), secrets.token_urlsafe(_SECRET_BYTES)
    link = ShareLink(
        share_id=secrets.token_hex(_ID_BYTES),
        digest=digest_of(secret),
        model_id=model_id,
        created_at=now,
        expires_at=None if lasts_s is None else now + timedelta(seconds=lasts_s),
    )
    await store.write(add, link, by=by)
    return link, secret


def url_of(server_url: str, link: ShareLink, secret: str) -> str:
    return f"{server_url.rstrip('/')}/#{urlencode({'run': link.model_id, 'share': secret})}"


def digest_of(secret: str) -> str:
    return hashlib.sha256(secret.encode()).hexdigest()


def _run_of(_: Connection, link: ShareLink, **_more: object) -> list[str]:
    return [link.model_id]


@locks(_run_of)
def add(tx: Transaction, link: ShareLink, *, by: Mapping[str, str] | None = None) -> None:
    """Raise NotFoundError if there is no such run, and UserError if it has MOST_LINKS links."""
    tenant = tenant_of_run(tx.connection, link.model_id)
    if _NUMBER.one(tx.connection, model=link.model_id) >= MOST_LINKS:
        msg = f"run {link.model_id!r} has {MOST_LINKS} share links, which is the most; revoke one"
        raise UserError(msg)
    _INSERT.run(tx.connection, **values_of(link))
    note_audit(tx, tenant, "share_link_create", by, model_id=link.model_id, share_id=link.share_id)


def find(connection: Connection, digest: str) -> ShareLink | None:
    """Return the link whose secret has this digest, expired or not."""
    return _FIND.first(connection, digest=digest)


def of_run(connection: Connection, model_id: str) -> list[ShareLink]:
    """Return the links of a run, oldest first."""
    return _LIST.all(connection, model=model_id)


def delete(tx: Transaction, model_id: str, share_id: str, *, by: Mapping[str, str] | None = None) -> bool:
    """Return whether the run had this link."""
    if _DELETE.run(tx.connection, model=model_id, share=share_id) == 0:
        return False
    tenant = tenant_of_run(tx.connection, model_id)
    note_audit(tx, tenant, "share_link_delete", by, model_id=model_id, share_id=share_id)
    return True
