"""What is queued and running, read once for all who ask."""

import asyncio
import time
from collections.abc import Sequence
from typing import Final

from tinsmith.store import PendingWork, RequestStore

_KEPT_S: Final = 1.0
_SHARE: Final = 20  # reading takes at most this part of the time, however much waits


class Backlog:
    """The store reads every operation that waits. So an answer is kept for a second, or longer if it took long."""

    def __init__(self, store: RequestStore) -> None:
        self._store = store
        self._lock = asyncio.Lock()
        self._found: Sequence[PendingWork] = ()
        self._until_s = -1e9

    async def list(self) -> Sequence[PendingWork]:
        async with self._lock:
            started = time.monotonic()
            if started >= self._until_s:
                self._found = await self._store.list_pending()
                ended = time.monotonic()
                self._until_s = ended + max(_KEPT_S, _SHARE * (ended - started))
            return self._found
