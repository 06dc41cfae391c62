"""API keys made over HTTP, as this server knows them: read from the store, and remembered for a second.

Whoever identifies a caller must not wait, so each request has its key looked up before.
"""

import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Final

from tinsmith.store import IssuedKey, RequestStore
from tinsmith.store.logins import has_ended, is_reference

KEPT_S: Final = 1.0
"""For so long, a server may accept a key that was deleted at another one."""
_MOST: Final = 10_000

Find = Callable[[str], Awaitable[IssuedKey | None]]


class IssuedKeys:
    """One per app. Look-ups are for the event loop, `get` for any thread."""

    def __init__(self, find: Find, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._find = find
        self._clock = clock
        self._known: OrderedDict[str, tuple[IssuedKey, float]] = OrderedDict()  # with the times of their look-ups

    def get(self, key_id: str) -> IssuedKey | None:
        """Return a key that was looked up and has not expired, or None."""
        known = self._known.get(key_id)
        if known is None or has_expired(known[0], datetime.now(UTC)):
            return None
        return known[0]

    async def look_up(self, key_id: str, *, unknown: bool = True) -> None:
        """Make `get` return what the store has, or had a second ago. `unknown`: also ask it for a key not seen before.

        Raises StoreError if the store cannot be read.
        """
        known, now_s = self._known.get(key_id), self._clock()
        if (known is None and not unknown) or (known is not None and now_s - known[1] < KEPT_S):
            return
        found = await self._find(key_id)
        if found is None:
            self.forget(key_id)
            return
        self._known[key_id] = found, now_s
        self._known.move_to_end(key_id)
        if len(self._known) > _MOST:
            self._known.popitem(last=False)

    def look_again(self) -> None:
        """Look every key up again before it is next used: what some were made with has ended."""
        self._known = OrderedDict((key_id, (key, float("-inf"))) for key_id, (key, _) in self._known.items())

    def forget(self, key_id: str) -> None:
        """Refuse a key from now on, until it is looked up again."""
        self._known.pop(key_id, None)


def has_expired(key: IssuedKey, now: datetime) -> bool:
    return key.expires_at is not None and key.expires_at <= now


async def find_usable(store: RequestStore, longest: timedelta, key_id: str) -> IssuedKey | None:
    """Return a key from the store, unless the login or account with which it was made has ended.

    longest: how long one lasts that no configured key is behind, whatever it says itself.
    """
    key = await store.find_api_key(key_id)
    if key is None or (key.made_with and not is_reference(key.made_with)):
        return key
    if key.made_with and await has_ended(store, key.made_with):
        return None
    latest = key.created_at + longest
    return key if key.expires_at is not None and key.expires_at <= latest else replace(key, expires_at=latest)
