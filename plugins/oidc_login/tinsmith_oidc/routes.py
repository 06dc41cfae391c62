"""The routes of the login: to the provider and back, who has signed in, and out."""

import base64
import hashlib
import hmac
import re
import secrets
from collections.abc import Callable
from html import escape
from typing import Annotated, Final, ParamSpec, TypeVar
from urllib.parse import urlencode, urlsplit

from fastapi import APIRouter, Depends, Query, Request, Response
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import HTMLResponse, JSONResponse, RedirectResponse

from tinsmith import AuthenticationError, Principal, RoutesContext, Settings
from tinsmith_oidc.config import OidcConfig
from tinsmith_oidc.cookies import Cookies, SignIn
from tinsmith_oidc.login import is_own_page
from tinsmith_oidc.provider import Provider
from tinsmith_oidc.sessions import Sessions
from tinsmith_oidc.users import Claims, NotAllowedError, account_of, principal_of, with_user_info

P = ParamSpec("P")
R = TypeVar("R")

_PATH: Final = "/login"
_CALLBACK: Final = f"{_PATH}/callback"
_OWN_PATH: Final = re.compile(r"/(?![/\\])[^\\\x00-\x20\x7f]*")
"""A path on this server: `//other.example` and what browsers take for it lead elsewhere."""
MOST_ASKING: Final = 16
"""Threads that may wait for the provider at a time. The server has 40 for everything."""

_HEADERS: Final = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": "default-src 'none'; frame-ancestors 'none'",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


class LoginRoutes:
    """What waits for the provider runs in threads, of which strangers get some only."""

    def __init__(
        self, settings: Settings, config: OidcConfig, provider: Provider, cookies: Cookies, sessions: Sessions
    ) -> None:
        self._public_url = settings.server.public_url
        self._home = f"{urlsplit(self._public_url or '').path.rstrip('/')}/"
        self._config = config
        self._provider = provider
        self._cookies = cookies
        self._sessions = sessions
        self._asking = 0  # threads that may wait for the provider

    def router(self, context: RoutesContext) -> APIRouter:
        router = APIRouter(tags=["login"])
        router.get(_PATH, response_class=RedirectResponse)(context.public(self.sign_in))
        router.get(_CALLBACK, response_class=RedirectResponse)(context.public(self.callback))
        router.get(f"{_PATH}/session")(context.public(self.session))
        router.post(f"{_PATH}/logout")(context.public(self.log_out))

        @router.post(f"{_PATH}/end")
        async def end_account(
            caller: Annotated[Principal, Depends(context.caller)],
            account: Annotated[str, Query(pattern="^[0-9a-f]{32}$")],
        ) -> Response:
            """End all sessions of an account, and the keys and links made with them: one's own; an administrator, any.

            Whoever may still sign in at the provider can sign in again.
            """
            return await self._end_account(caller, account)

        return router

    async def sign_in(self, request: Request, next_path: Annotated[str, Query(alias="next")] = "") -> Response:
        """Send the browser to the provider. `next` is the path on this server to come back to."""
        try:
            return await self._in_thread(self._begin, request, next_path)
        except AuthenticationError as error:
            return _failure(error, self._home)

    async def _in_thread(self, work: Callable[P, R], *args: P.args, **options: P.kwargs) -> R:
        """Do what may wait for the provider. Raises AuthenticationError if too many do so."""
        if self._asking >= MOST_ASKING:
            msg = f"{MOST_ASKING} sign-ins wait for the provider, as many as may at a time; try again in some seconds"
            raise AuthenticationError(msg)
        self._asking += 1
        try:
            return await run_in_threadpool(work, *args, **options)
        finally:
            self._asking -= 1

    def _begin(self, request: Request, next_path: str) -> Response:
        sign_in = SignIn(
            state=secrets.token_urlsafe(32),
            nonce=secrets.token_urlsafe(32),
            verifier=secrets.token_urlsafe(48),
            redirect_uri=f"{self._url(request)}{_CALLBACK}",
            next_path=next_path if next_path.startswith(self._home) and _OWN_PATH.fullmatch(next_path) else self._home,
        )
        challenge = hashlib.sha256(sign_in.verifier.encode()).digest()
        query = {
            "response_type": "code",
            "client_id": self._config.client_id,
            "redirect_uri": sign_in.redirect_uri,
            "scope": " ".join(self._config.scopes),
            "state": sign_in.state,
            "nonce": sign_in.nonce,
            "code_challenge": base64.urlsafe_b64encode(challenge).rstrip(b"=").decode(),
            "code_challenge_method": "S256",
        }
        url = _with_query(self._provider.endpoint("authorization_endpoint"), query)
        answer = RedirectResponse(url, 303, _HEADERS)
        self._cookies.start(answer, sign_in)
        return answer

    async def callback(
        self,
        request: Request,
        code: str = "",
        state: str = "",
        iss: str | None = None,
        error: str | None = None,
    ) -> Response:
        """Take the provider's answer, and open a session. A sign-in that this browser has not begun is refused."""
        try:
            sign_in = await self._in_thread(self._sign_in_of, request, state, iss)
            claims = await self._in_thread(self._claims, sign_in, code, error)
            user = await self._user(claims)
        except AuthenticationError as failure:
            answer = _failure(failure, self._home)
        else:
            answer = RedirectResponse(sign_in.next_path, 303, _HEADERS)
            account = account_of(claims, self._config)
            await self._sessions.began(self._cookies.open(answer, user, account))
        self._cookies.finish(answer)
        return answer

    async def session(self, request: Request) -> JSONResponse:
        """Return who has signed in with this browser, and until when; `user` is null if nobody has."""
        found = self._sessions.of(request.headers)
        if found is None or found.login is None:
            return JSONResponse({"user": None}, headers=_HEADERS)
        user = {"tenant": found.tenant, "name": found.name, "admin": found.admin, "account": found.login.account}
        return JSONResponse({"user": user, "expires_at": int(found.login.expires_at.timestamp())}, headers=_HEADERS)

    async def _end_account(self, caller: Principal, account: str) -> Response:
        if not caller.admin and (caller.login is None or caller.login.account != account):
            return JSONResponse({"detail": "only an administrator ends what another account has"}, 403, _HEADERS)
        await self._sessions.end_account(account, tenant=caller.tenant, by=_by(caller, account))
        return JSONResponse({"ended": account}, headers=_HEADERS)

    async def log_out(self, request: Request, *, everywhere: bool = False) -> Response:
        """End the session, and the keys and links made with it. The answer names where the provider's own ends.

        `everywhere`: end all sessions of the account, and all keys and links that were made with them.
        """
        if not is_own_page(request.headers, request.method):
            return JSONResponse({"detail": "only a page of this server can end its session"}, 403, _HEADERS)
        if (user := self._sessions.of(request.headers)) is not None:
            await self._sessions.end(user)
            if everywhere and user.login is not None:
                account = user.login.account
                await self._sessions.end_account(account, tenant=user.tenant, by=_by(user, account))
        try:
            redirect = await self._in_thread(self._end_of_session, request)
        except AuthenticationError:  # the provider is away, or slow; the session here has ended
            redirect = self._home
        answer = JSONResponse({"redirect": redirect}, headers=_HEADERS)
        self._cookies.close(answer)
        return answer

    def _sign_in_of(self, request: Request, state: str, iss: str | None) -> SignIn:
        sign_in = self._cookies.started(request.headers)
        if sign_in is None or not hmac.compare_digest(sign_in.state.encode(), state.encode()):
            msg = "this browser has begun no such sign-in, or more than ten minutes ago"
            raise AuthenticationError(msg)
        names_itself = self._provider.metadata("authorization_response_iss_parameter_supported") is True  # RFC 9207
        if iss != self._config.issuer and (names_itself or iss is not None):
            msg = f"the answer is of another provider, {iss!r:.200}"
            raise AuthenticationError(msg)
        return sign_in

    async def _user(self, claims: Claims) -> Principal:
        """An account that may no longer sign in loses the sessions, keys and links that it has."""
        try:
            return principal_of(claims, self._config)
        except NotAllowedError:
            account = account_of(claims, self._config)
            by = {"actor": account, "login": "oidc", "ended_account": account, "reason": "may not use this server"}
            await self._sessions.end_account(account, tenant="", by=by)
            raise

    def _claims(self, sign_in: SignIn, code: str, error: str | None) -> Claims:
        if error is not None:
            msg = f"the provider did not sign you in: {error[:200]}"
            raise AuthenticationError(msg)
        tokens = self._provider.redeem(code, verifier=sign_in.verifier, redirect_uri=sign_in.redirect_uri)
        claims = self._provider.verified(tokens.id_token, audiences=(self._config.client_id,))
        _expect_ours(claims, sign_in.nonce, self._config.client_id)
        if tokens.access_token is not None:
            claims = with_user_info(claims, self._provider.user_info(tokens.access_token, claims["sub"]))
        return claims

    def _end_of_session(self, request: Request) -> str:
        """Return the provider's page for it (OpenID Connect RP-Initiated Logout 1.0), or our own."""
        found = self._provider.metadata("end_session_endpoint")
        if not isinstance(found, str):
            return self._home
        query = {"client_id": self._config.client_id, "post_logout_redirect_uri": f"{self._url(request)}/"}
        return _with_query(found, query)

    def _url(self, request: Request) -> str:
        return (self._public_url or str(request.base_url)).rstrip("/")


def _by(user: Principal, account: str) -> dict[str, str]:
    return {"actor": user.name or user.tenant, "login": "oidc", "ended_account": account}


def _expect_ours(claims: Claims, nonce: str, client_id: str) -> None:
    """Check what an ID token alone has (OpenID Connect Core 1.0, 3.1.3.7)."""
    given = claims.get("nonce")
    if not isinstance(given, str) or not hmac.compare_digest(given.encode(), nonce.encode()):
        msg = "the ID token is of another sign-in: its nonce differs; sign in again"
        raise AuthenticationError(msg)
    if claims.get("azp", client_id) != client_id or (isinstance(claims["aud"], list) and len(claims["aud"]) > 1):
        msg = "the ID token is meant for others as well; only one for this client alone is accepted"
        raise AuthenticationError(msg)


def _with_query(url: str, query: dict[str, str]) -> str:
    return f"{url}{'&' if urlsplit(url).query else '?'}{urlencode(query)}"


def _failure(error: AuthenticationError, home: str) -> Response:
    text = escape(str(error))
    page = f"<!doctype html><title>Sign-in failed</title><h1>Sign-in failed</h1><p>{text}.</p>"
    return HTMLResponse(f"{page}<p><a href='{escape(home)}'>Back</a></p>", 401, _HEADERS)
