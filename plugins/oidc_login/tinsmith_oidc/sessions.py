"""The sessions of browsers: which one a request belongs to, unless it has ended, at whichever server of the store.

A cookie is good by its signature alone. So who signs out is written to the store, and asked there for each session at
most once a second.
"""

import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import Final

from tinsmith import Principal, RoutesContext
from tinsmith.logins import AuditEntry, Login, end_account, has_ended
from tinsmith_oidc.cookies import Cookies

KEPT_S: Final = 1.0
"""For so long, a server may accept a session that was ended at another one."""
_MOST: Final = 10_000
_ENDED: Final = float("inf")  # in place of a time: nothing is looked up again


class Sessions:
    """`of` is for any thread, everything else for the event loop. A session is the user of it, with the login."""

    def __init__(
        self, cookies: Cookies, context: RoutesContext, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._cookies = cookies
        self._store = context.store
        self._tell_core = context.logins_ended
        self._clock = clock
        self._known: OrderedDict[str, float] = OrderedDict()  # when each was last found open; _ENDED: it was not

    async def look_up(self, headers: Mapping[str, str]) -> None:
        """Read whether the session of a request has ended. A forged cookie costs no look-up."""
        login = _login_of(self._cookies.session(headers))
        if login is None:
            return
        name, now_s = login.login_id, self._clock()
        if now_s - self._known.get(name, float("-inf")) < KEPT_S:
            return
        ended = await has_ended(self._store, login.reference)
        self._note(name, _ENDED if ended or self._known.get(name) == _ENDED else now_s)

    def of(self, headers: Mapping[str, str]) -> Principal | None:
        """Return the session of a request that was looked up; None if it has none, or it has ended."""
        user = self._cookies.session(headers)
        login = _login_of(user)
        return None if login is None or self._known.get(login.login_id, _ENDED) == _ENDED else user

    async def began(self, user: Principal) -> None:
        """Write a sign-in to the audit log."""
        entry = AuditEntry(at=datetime.now(UTC), tenant=user.tenant, event="user_login", details=_by(user))
        await self._store.add_audit_entry(entry)

    async def end(self, user: Principal) -> None:
        """End a session at all servers of the store, even if somebody has kept its cookie."""
        if (login := user.login) is not None:
            by = _by(user)
            await self._store.end_login(login.login_id, tenant=user.tenant, until=login.expires_at, by=by)
            self._note(login.login_id, _ENDED)
            self._tell_core()

    async def end_account(self, account: str, *, tenant: str, by: Mapping[str, str]) -> None:
        """End all sessions of an account, and all that was made with them: others within a second, those here now."""
        await end_account(self._store, account, tenant=tenant, now=datetime.now(UTC), by=by)
        self._known = OrderedDict((name, found) for name, found in self._known.items() if found == _ENDED)
        self._tell_core()

    def _note(self, session_id: str, found_s: float) -> None:
        self._known[session_id] = found_s
        self._known.move_to_end(session_id)
        if len(self._known) > _MOST:
            self._known.popitem(last=False)


def _login_of(user: Principal | None) -> Login | None:
    return None if user is None else user.login


def _by(user: Principal) -> dict[str, str]:
    account = {} if user.login is None else {"account": user.login.account}
    return {"actor": user.name or user.tenant, "login": "oidc", **account}
