"""Logins by which people have signed in, and the end of what is made with them.

A credential that is made with a login names it by a reference. It ends with the login; or, if it is meant to last
longer, with the account of whoever signed in.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Final

from tinsmith.store.request_store import RequestStore

LONGEST: Final = timedelta(days=366)
"""No login, and nothing that is made with one, lasts longer."""

_MARK: Final = "login"
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_MICROSECOND: Final = timedelta(microseconds=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Login:
    """A session or a token by which somebody has signed in. Ids have letters, digits, `-` and `_` only."""

    login_id: str
    account: str  # the same in all logins of one person
    began_at: datetime
    expires_at: datetime

    @property
    def reference(self) -> str:
        return _reference(self.account, self.began_at, self.login_id)


def of_account(account: str, made_at: datetime) -> str:
    """Return the reference of what outlives a login, and ends with the account."""
    return _reference(account, made_at, "")


def is_reference(text: str) -> bool:
    """Return whether this names a login or an account, rather than an API key."""
    return text.startswith(f"{_MARK}:")


def account_in(reference: str) -> str:
    return reference.split(":")[1]


async def has_ended(store: RequestStore, reference: str) -> bool:
    """Return whether what is named has ended before its time."""
    _, account, stamp, login_id = reference.split(":")
    if login_id and await store.ended_login(login_id) is not None:
        return True
    until = await store.ended_login(_row_of(account))
    return until is not None and _EPOCH + int(stamp) * _MICROSECOND + LONGEST <= until


async def end_account(
    store: RequestStore, account: str, *, tenant: str, now: datetime, by: Mapping[str, str] | None = None
) -> None:
    """End whatever was made so far with logins of an account, and these. Later logins are others."""
    await store.end_login(_row_of(account), tenant=tenant, until=now + LONGEST, by=by)


def _row_of(account: str) -> str:
    return f"account {account}"


def _reference(account: str, at: datetime, login_id: str) -> str:
    return f"{_MARK}:{account}:{(at - _EPOCH) // _MICROSECOND}:{login_id}"
