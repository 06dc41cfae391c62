"""Tokens (JWT) that stand in for an API key for a limited time; `auth/token` issues them.

A token identifies its key by a keyed hash and is valid only as long as that key. Owner and rights are not in the
token: they are looked up with every request.
"""

import hashlib
import hmac
import time
from dataclasses import dataclass
from typing import Final

import jwt

from tinsmith.errors import InvalidTokenError
from tinsmith.hook_values import Principal
from tinsmith.json_values import Json

AUDIENCE: Final = "tinsmith"
_ALGORITHM: Final = "HS256"
_CLAIMS: Final = ("aud", "exp", "iat", "sub", "key")
_SKEW_S: Final = 30  # between the clocks of servers that share a store
_MOST_KNOWN: Final = 1000
_RENEW: Final = "exchange the API key for a new one (the SDK does)"


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyToken:
    """The contents of a token whose signature has been checked."""

    tenant: str
    key_id: str
    expires_at: int  # seconds since 1970


class KeyTokens:
    """Issues and reads tokens with a secret that all servers on one store share."""

    def __init__(self, secret: bytes, lifetime_s: int) -> None:
        self._secret = secret
        self._lifetime_s = lifetime_s
        self._read_before: dict[str, KeyToken] = {}  # the oldest first

    def key_id(self, digest: str) -> str:
        """Return an id of the key with this digest. It does not reveal the key, not even by trying out keys."""
        return hmac.new(self._secret, digest.encode(), hashlib.sha256).hexdigest()[:32]

    def issue(self, principal: Principal, key_id: str, *, not_after: int | None = None) -> str:
        now = int(time.time())
        expires_at = now + self._lifetime_s
        claims = {
            "iss": AUDIENCE,
            "aud": AUDIENCE,
            "iat": now,
            "exp": expires_at if not_after is None else min(expires_at, not_after),
            "sub": principal.tenant,  # `tinker auth whoami` shows this and the next two
            "org_id": principal.tenant,
            "email": principal.name if "@" in principal.name else "",
            "key": key_id,
        }
        return jwt.encode(claims, self._secret, algorithm=_ALGORITHM)

    def read(self, token: str) -> KeyToken:
        """Raises InvalidTokenError if the token has expired, is for another audience, or has a wrong signature.

        What does not change with time is checked once: decoding takes as long as several statements of the store.
        """
        known = self._read_before.get(token)
        if known is not None and time.time() < known.expires_at:
            return known
        found = self._decoded(token)
        self._read_before[token] = found
        for oldest in list(self._read_before)[:-_MOST_KNOWN]:
            self._read_before.pop(oldest, None)  # another thread may have been faster
        return found

    def _decoded(self, token: str) -> KeyToken:
        try:
            claims: dict[str, Json] = jwt.decode(
                token,
                self._secret,
                algorithms=[_ALGORITHM],
                audience=AUDIENCE,
                issuer=AUDIENCE,
                leeway=min(_SKEW_S, self._lifetime_s // 4),
                options={"require": list(_CLAIMS)},
            )
        except jwt.ExpiredSignatureError as error:
            msg = f"this token has expired; {_RENEW}"
            raise InvalidTokenError(msg) from error
        except jwt.InvalidAudienceError as error:
            msg = f"this token is not for this server, which accepts only tokens for {AUDIENCE!r}; {_RENEW}"
            raise InvalidTokenError(msg) from error
        except jwt.PyJWTError as error:
            msg = f"this server did not issue this token ({str(error).lower()}); {_RENEW}"
            raise InvalidTokenError(msg) from error
        return KeyToken(tenant=claims["sub"], key_id=str(claims["key"]), expires_at=int(claims["exp"]))
