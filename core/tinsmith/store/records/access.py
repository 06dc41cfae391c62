"""Keys, and the log of who did what."""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime


@dataclass(frozen=True, slots=True, kw_only=True)
class IssuedKey:
    """An API key that was made over HTTP. The key itself is kept nowhere."""

    key_id: str  # a keyed hash of the key
    tenant: str
    name: str
    note: str = ""
    made_with: str = ""  # id of the configured key behind it, or the login: `logins.py`; empty: a plugin knew its maker
    created_at: datetime
    expires_at: datetime | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditEntry:
    """Something that was done to what a tenant has. The store writes it in the transaction of the deed."""

    at: datetime
    tenant: str  # whose it is; empty: a request without a valid key
    event: str  # `<resource>_<action>`
    details: Mapping[str, str]  # who did it, and to what
