"""Knows who sends a request: by the cookie of a session, or by a bearer token that the provider has signed."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Final
from urllib.parse import urlsplit

import tinsmith
from tinsmith_oidc.config import OidcConfig
from tinsmith_oidc.provider import Provider
from tinsmith_oidc.sessions import Sessions
from tinsmith_oidc.users import login_of, principal_of

_BEARER: Final = "bearer "
_READING: Final = ("GET", "HEAD", "OPTIONS")


class Login:
    """The server registers one as a plugin."""

    def __init__(self, config: OidcConfig, provider: Provider, sessions: Sessions) -> None:
        self._config = config
        self._provider = provider
        self._sessions = sessions

    @tinsmith.hookimpl
    def tinsmith_authenticate(self, headers: Mapping[str, str], method: str) -> tinsmith.Principal | None:
        """A key or token that a request brings counts before its cookie, which browsers send by themselves."""
        if credential := _credential_of(headers):
            is_ours = credential.startswith("eyJ") and self._provider.issued(credential)
            return self._of_token(credential) if is_ours else None
        user = self._sessions.of(headers)
        if user is None:
            return None
        if not is_own_page(headers, method):
            msg = (
                "this request has a session's cookie, but another site's page may have sent it; send an API key, or "
                "from a page of this server"
            )
            raise tinsmith.AuthenticationError(msg)
        return user

    def _of_token(self, token: str) -> tinsmith.Principal:
        audiences = (self._config.client_id, *filter(None, [self._config.audience]))
        claims = self._provider.verified(token, audiences=audiences)
        return replace(principal_of(claims, self._config), login=login_of(token, claims, self._config))


def is_own_page(headers: Mapping[str, str], method: str) -> bool:
    """Return whether a request with a cookie comes from a page of this server, or changes nothing.

    Browsers say so themselves: in `Sec-Fetch-Site` where the connection is safe, else in `Origin`.
    """
    if (site := headers.get("sec-fetch-site")) is not None:
        return site == "same-origin" or (site == "none" and method in _READING)
    if (origin := headers.get("origin")) is not None:
        return urlsplit(origin).netloc == headers.get("host")
    return method in _READING


def _credential_of(headers: Mapping[str, str]) -> str:
    if (key := headers.get("x-api-key")) is not None:
        return key
    given = headers.get("authorization", "")
    return given[len(_BEARER) :].strip() if given[: len(_BEARER)].lower() == _BEARER else ""
