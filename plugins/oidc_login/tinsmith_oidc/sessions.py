"""The sessions of browsers: which one a request belongs to, unless it has ended, at whichever server of the store.

A cookie is good by its signature alone. So who signs out is written to the store, and asked there for each session at
most once a second.
"""

import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import Final

from tinsmith import RoutesContext
from tinsmith.logins import AuditEntry
from tinsmith_oidc.cookies import Cookies, Session

KEPT_S: Final = 1.0
"""For so long, a server may accept a session that was ended at another one."""
_MOST: Final = 10_000
_ENDED: Final = float("inf")  # in place of a time: nothing is looked up again


class Sessions:
    """`look_up`, `began` and `end` are for the event loop, `of` for any thread."""

    def __init__(
        self, cookies: Cookies, context: RoutesContext, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._cookies = cookies
        self._store = context.store
        self._clock = clock
        self._known: OrderedDict[str, float] = OrderedDict()  # when each was last found open; _ENDED: it was not

    async def look_up(self, headers: Mapping[str, str]) -> None:
        """Read whether the session of a request has ended. A forged cookie costs no look-up."""
        session = self._cookies.session(headers)
        if session is None:
            return
        name, now_s = session.session_id, self._clock()
        if now_s - self._known.get(name, float("-inf")) < KEPT_S:
            return
        ended = await self._store.is_login_ended(name)
        self._note(name, _ENDED if ended or self._known.get(name) == _ENDED else now_s)

    def of(self, headers: Mapping[str, str]) -> Session | None:
        """Return the session of a request that was looked up; None if it has none, or it has ended."""
        session = self._cookies.session(headers)
        return None if session is None or self._known.get(session.session_id, _ENDED) == _ENDED else session

    async def began(self, session: Session) -> None:
        """Write a sign-in to the audit log."""
        user = session.user
        entry = AuditEntry(at=datetime.now(UTC), tenant=user.tenant, event="user_login", details=_by(session))
        await self._store.add_audit_entry(entry)

    async def end(self, session: Session) -> None:
        """End a session at all servers of the store, even if somebody has kept its cookie."""
        until = datetime.fromtimestamp(session.expires_at, UTC)
        await self._store.end_login(session.session_id, tenant=session.user.tenant, until=until, by=_by(session))
        self._note(session.session_id, _ENDED)

    def _note(self, session_id: str, found_s: float) -> None:
        self._known[session_id] = found_s
        self._known.move_to_end(session_id)
        if len(self._known) > _MOST:
            self._known.popitem(last=False)


def _by(session: Session) -> dict[str, str]:
    return {"actor": session.user.name or session.user.tenant, "login": "oidc"}
