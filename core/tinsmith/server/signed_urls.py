"""Download links that work without a key: the SDK fetches checkpoint files with plain urllib.

A link names what it rests on: the checkpoint or session, the key with which it was made, and the right by which the
owner of that key read it. The link's server checks that all of that still holds.
"""

import hashlib
import hmac
import re
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Final, Self
from urllib.parse import quote

from tinsmith.errors import AuthenticationError

_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_MICROSECOND: Final = timedelta(microseconds=1)
_FORM: Final = re.compile(r"(-?\d{1,18})([op])([0-9A-Za-z_:-]*)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Grant:
    """The conditions of a link, in addition to the checkpoint's path or the session's id."""

    created_at: datetime  # of the checkpoint or session: another one under the same name is not meant
    only_while_public: bool
    key_id: str  # of the API key with which it was made, or the login's reference; empty if a plugin knew the caller

    def __str__(self) -> str:
        right = "p" if self.only_while_public else "o"
        return f"{(self.created_at - _EPOCH) // _MICROSECOND}{right}{self.key_id}"

    @classmethod
    def parse(cls, text: str) -> Self:
        """Raises AuthenticationError if `text` is not what `str` makes of a grant."""
        found = _FORM.fullmatch(text)
        if found is None:
            raise AuthenticationError(_WRONG)
        created_at = _EPOCH + int(found[1]) * _MICROSECOND
        return cls(created_at=created_at, only_while_public=found[2] == "p", key_id=found[3])


class UrlSigner:
    """Signs (name, expiry, grant) with a secret that all servers on one store share."""

    def __init__(self, secret: bytes) -> None:
        self._secret = secret

    def url_path(self, name: str, expires: datetime, grant: Grant) -> str:
        """Return `<expiry>/<grant>/<signature>/<name>`, escaped for a URL."""
        stamp = int(expires.timestamp())
        return f"{stamp}/{grant}/{self._sign(name, stamp, str(grant))}/{quote(name)}"

    def check(self, name: str, stamp: int, grant: str, signature: str, now: datetime) -> Grant:
        """Return the link's grant. Raises AuthenticationError if the link was not made here or has expired."""
        if not hmac.compare_digest(signature.encode(), self._sign(name, stamp, grant).encode()):
            raise AuthenticationError(_WRONG)
        if now.timestamp() > stamp:
            msg = "this download link has expired; ask for a new one"
            raise AuthenticationError(msg)
        return Grant.parse(grant)

    def is_link(self, path: str, now: datetime) -> bool | None:
        """Return whether the link of a path below the API's prefix was made here; None for a path of no link.

        It may be revoked since.
        """
        if not path.startswith(_LINKS) or len(parts := path.split("/", 4)) < 5:
            return None
        _, stamp, grant, signature, name = parts
        try:
            self.check(name, int(stamp), grant, signature, now)
        except (AuthenticationError, ValueError):
            return False
        return True

    def _sign(self, name: str, stamp: int, grant: str) -> str:
        return hmac.new(self._secret, f"{stamp}\0{grant}\0{name}".encode(), hashlib.sha256).hexdigest()


_LINKS: Final = ("files/", "archives/", "traces/", "uploads/")
_WRONG: Final = "the signature of this download link is wrong; ask for a new one"
