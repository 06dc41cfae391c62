"""Signed cookies: one for the minutes of a sign-in, one for the session after it.

Nobody but this server can make or change them. What they hold is no secret from their browser: who has signed in.
"""

import hmac
import secrets
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from http.cookies import CookieError, SimpleCookie
from typing import Any, Final

import jwt
from starlette.responses import Response

from tinsmith import Principal

SIGN_IN_S: Final = 600
"""The time that somebody has to sign in at the provider."""

_ALGORITHM: Final = "HS256"


@dataclass(frozen=True, slots=True, kw_only=True)
class SignIn:
    """What must come back from the provider, and where to go then."""

    state: str
    nonce: str
    verifier: str  # of PKCE
    redirect_uri: str
    next_path: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Session:
    session_id: str
    user: Principal
    expires_at: int  # seconds since 1970


class Cookies:
    """Sets and reads both cookies. Thread-safe."""

    def __init__(self, secret: bytes, *, purpose: str, session_s: int, secure: bool) -> None:
        """Make it.

        secret, purpose: cookies of the same ones are valid.
        secure: whether browsers reach the server by https alone. Then no other host of its domain can set the cookies.
        """
        self._secret = hmac.digest(secret, f"tinsmith-oidc cookies {purpose}".encode(), "sha256")
        self._session_s = session_s
        self._secure = secure
        prefix = "__Host-" if secure else ""
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

    def open(self, answer: Response, user: Principal) -> Session:
        """Begin a session, and return it."""
        session_id = secrets.token_urlsafe(16)
        expires_at = self._set(answer, self._session, self._session_s, {"sid": session_id, **asdict(user)})
        return Session(session_id=session_id, user=user, expires_at=expires_at)

    def session(self, headers: Mapping[str, str]) -> Session | None:
        """Return the session of a browser; None if it has none, the cookie is forged, or its time is over."""
        claims = self._read(headers, self._session)
        if claims is None:
            return None
        user = Principal(tenant=claims["tenant"], name=claims["name"], admin=claims["admin"])
        return Session(session_id=claims["sid"], user=user, expires_at=claims["exp"])

    def close(self, answer: Response) -> None:
        """Have the browser forget its session."""
        self._delete(answer, self._session)

    def _set(self, answer: Response, name: str, seconds: int, values: dict[str, Any]) -> int:
        """Return when it expires, in seconds since 1970."""
        expires_at = int(time.time()) + seconds
        value = jwt.encode({"aud": name, "exp": expires_at, **values}, self._secret, _ALGORITHM)
        answer.set_cookie(name, value, seconds, path="/", secure=self._secure, httponly=True, samesite="lax")
        return expires_at

    def _delete(self, answer: Response, name: str) -> None:
        answer.delete_cookie(name, path="/", secure=self._secure, httponly=True, samesite="lax")

    def _read(self, headers: Mapping[str, str], name: str) -> dict[str, Any] | None:
        try:
            cookies = SimpleCookie(headers.get("cookie", ""))
            claims: dict[str, Any] = jwt.decode(cookies[name].value, self._secret, [_ALGORITHM], audience=name)
        except (CookieError, KeyError, jwt.PyJWTError):
            return None
        return claims
