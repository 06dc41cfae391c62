"""Wake-ups: within this process by events, between processes by a channel that belongs to the database.

A wake-up may be lost, or come too often. So a waiting call subscribes, reads the database, waits, and reads again.
"""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

from sqlalchemy import Connection


class WakeUps(ABC):
    """The topics that one process waits for, and tells to the others."""

    def __init__(self) -> None:
        self._waiting: dict[str, set[asyncio.Event]] = {}

    @contextmanager
    def subscribe(self, topic: str) -> Iterator[asyncio.Event]:
        """Yield an event that is set whenever the topic is told; the caller clears it."""
        event = asyncio.Event()
        self._waiting.setdefault(topic, set()).add(event)
        try:
            yield event
        finally:
            subscribed = self._waiting[topic]
            subscribed.remove(event)
            if not subscribed:
                del self._waiting[topic]

    def topics(self) -> list[str]:
        """Return the topics that this process waits for."""
        return list(self._waiting)

    def enlist(self, connection: Connection, topics: list[str]) -> None:
        """Have the transaction itself tell the other processes when it commits, if the database can do that."""

    def wake(self, topics: Iterable[str]) -> None:
        """Wake the calls that wait in this process, after the commit. From the thread of the event loop."""
        for topic in topics:
            for event in self._waiting.get(topic, ()):
                event.set()

    @abstractmethod
    async def open(self) -> None: ...

    @abstractmethod
    async def close(self) -> None: ...

    @abstractmethod
    def send(self, topics: Sequence[str]) -> None:
        """Wake the calls that wait in other processes, after the commit. From any thread; does not block.

        Messages that cannot be sent at once are dropped.
        """
