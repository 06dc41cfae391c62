"""Signed cookies: one for the minutes of a sign-in, one for the session after it.

Nobody but this server can make or change them. What they hold is no secret from their browser: who has signed in.
"""

import hmac
import secrets
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from datetime import UTC, datetime, timedelta
from http.cookies import CookieError, SimpleCookie
from typing import Any, Final

import jwt
from starlette.responses import Response

from tinsmith import Principal
from tinsmith.logins import Login

SIGN_IN_S: Final = 600
"""The time that somebody has to sign in at the provider."""

_ALGORITHM: Final = "HS256"
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)


@dataclass(frozen=True, slots=True, kw_only=True)
class SignIn:
    """What must come back from the provider, and where to go then."""

    state: str
    nonce: str
    verifier: str  # of PKCE
    redirect_uri: str
    next_path: str


class Cookies:
    """Sets and reads both cookies. Thread-safe."""

    def __init__(self, secret: bytes, *, purpose: str, session_s: int, secure: bool, path: str = "/") -> None:
        """Make it.

        secret, purpose: cookies of the same ones are valid.
        secure: whether browsers reach the server by https alone. Then no other host of its domain can set the cookies,
            if it has a host of its own.
        path: below which a proxy serves it. Servers below others do not get the cookies.
        """
        self._secret = hmac.digest(secret, f"tinsmith-oidc cookies {purpose}".encode(), "sha256")
        self._session_s = session_s
        self._secure = secure
        self._path = path
        prefix = ("__Host-" if path == "/" else "__Secure-") if secure else ""
        self._session = f"{prefix}tinsmith_session"
        self._sign_in = f"{prefix}tinsmith_sign_in"

    def start(self, answer: Response, sign_in: SignIn) -> None:
        self._set(answer, self._sign_in, SIGN_IN_S, asdict(sign_in))

    def started(self, headers: Mapping[str, str]) -> SignIn | None:
        """Return the sign-in that this browser has begun; None if there is none, or it took too long."""
        claims = self._read(headers, self._sign_in)
        return None if claims is None else SignIn(**{name: claims[name] for name in SignIn.__dataclass_fields__})

    def finish(self, answer: Response) -> None:
        self._delete(answer, self._sign_in)

    def open(self, answer: Response, user: Principal, account: str) -> Principal:
        """Begin a session. Return the user with the login that it is."""
        values = {"sid": secrets.token_urlsafe(16), "account": account, "began": time.time_ns() // 1000}
        values |= {"tenant": user.tenant, "name": user.name, "admin": user.admin}
        expires_at = self._set(answer, self._session, self._session_s, values)
        return _user({**values, "exp": expires_at})

    def session(self, headers: Mapping[str, str]) -> Principal | None:
        """Return the user of a browser's session; None if it has none, the cookie is forged, or its time is over."""
        claims = self._read(headers, self._session)
        return None if claims is None or "began" not in claims else _user(claims)

    def close(self, answer: Response) -> None:
        """Have the browser forget its session."""
        self._delete(answer, self._session)

    def _set(self, answer: Response, name: str, seconds: int, values: dict[str, Any]) -> int:
        """Return when it expires, in seconds since 1970."""
        expires_at = int(time.time()) + seconds
        value = jwt.encode({"aud": name, "exp": expires_at, **values}, self._secret, _ALGORITHM)
        answer.set_cookie(name, value, seconds, path=self._path, secure=self._secure, httponly=True, samesite="lax")
        return expires_at

    def _delete(self, answer: Response, name: str) -> None:
        answer.delete_cookie(name, path=self._path, secure=self._secure, httponly=True, samesite="lax")

    def _read(self, headers: Mapping[str, str], name: str) -> dict[str, Any] | None:
        try:
            cookies = SimpleCookie(headers.get("cookie", ""))
            claims: dict[str, Any] = jwt.decode(cookies[name].value, self._secret, [_ALGORITHM], audience=name)
        except (CookieError, KeyError, jwt.PyJWTError):
            return None
        return claims


def _user(claims: Mapping[str, Any]) -> Principal:
    login = Login(
        login_id=claims["sid"],
        account=claims["account"],
        began_at=_EPOCH + timedelta(microseconds=claims["began"]),
        expires_at=_EPOCH + timedelta(seconds=claims["exp"]),
    )
    return Principal(tenant=claims["tenant"], name=claims["name"], admin=claims["admin"], login=login)
