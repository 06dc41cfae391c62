"""Wake-ups: how calls that wait in one process learn of changes by any process.

A wake-up may be lost, or come too often. So a waiting call subscribes to a topic, reads the store, waits, and reads
again. A message, which is a topic with a text, is told to those who listen to the topic just then, and is never kept.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import TypeVar

T = TypeVar("T")

_DONE = "done "
_TEXT = "\t"  # between the topic and the text of a message


def work_topic(base_model: str) -> str:
    """Told when something may be claimed, or was cancelled while it ran."""
    return f"work {base_model}"


def places_topic(base_model: str) -> str:
    """Told when a place for a model may have become free, and when a model begins to wait for one."""
    return f"places {base_model}"


def lease_topic(base_model: str) -> str:
    """Told when a lease is released."""
    return f"lease {base_model}"


def samples_topic(subject_id: str, clone: int) -> str:
    """Told when a sample of a client has finished."""
    return f"samples {subject_id} {clone}"


def metrics_topic(model_id: str) -> str:
    """Told when a model has new metrics."""
    return f"metrics {model_id}"


def drawn_topic(sampling_session_id: str, seq_id: int) -> str:
    """Its messages are the tokens of a sample, while it is drawn."""
    return f"drawn {sampling_session_id} {seq_id}"


def done_topic(request_id: str) -> str:
    return _DONE + request_id


def message(topic: str, text: str) -> str:
    """Return what is told in place of a topic. The text has neither tabs nor line breaks."""
    return topic + _TEXT + text


def request_of(topic: str) -> str | None:
    """Return the request_id of a `done_topic`, None for any other."""
    return topic.removeprefix(_DONE) if topic.startswith(_DONE) else None


class WakeUps:
    """The calls of one event loop that wait, by topic."""

    def __init__(self) -> None:
        self._waiting: dict[str, set[asyncio.Event]] = {}
        self._hearers: dict[str, list[Callable[[str], None]]] = {}
        self._events: dict[str, asyncio.Event] = {}  # that stay subscribed
        self._subscriptions = ExitStack()

    @contextmanager
    def subscribe(self, topic: str) -> Iterator[asyncio.Event]:
        """Yield an event that is set whenever the topic is announced; the caller clears it."""
        event = asyncio.Event()
        self._waiting.setdefault(topic, set()).add(event)
        try:
            yield event
        finally:
            subscribed = self._waiting[topic]
            subscribed.remove(event)
            if not subscribed:
                del self._waiting[topic]

    @contextmanager
    def listen(self, topic: str, hear: Callable[[str], None]) -> Iterator[None]:
        """Call `hear` with the text of each message of the topic that is told meanwhile."""
        self._hearers.setdefault(topic, []).append(hear)
        try:
            yield
        finally:
            hearers = self._hearers[topic]
            hearers.remove(hear)
            if not hearers:
                del self._hearers[topic]

    def topics(self) -> list[str]:
        """Return the topics that something waits for."""
        return list(self._waiting)

    def wake(self, topics: Iterable[str]) -> None:
        """Wake the calls that wait for these topics, and pass messages on. From the thread of the event loop."""
        for each in topics:
            topic, is_message, text = each.partition(_TEXT)
            if is_message:
                for hear in list(self._hearers.get(topic, ())):
                    hear(text)
            else:
                for event in self._waiting.get(topic, ()):
                    event.set()

    async def read_until(
        self, done: Callable[[T], bool], read: Callable[[], Awaitable[T]], *, topic: str, timeout_s: float
    ) -> T:
        """Read again after each wake-up, until the answer is `done` or the time is over. Return the last answer."""
        if timeout_s > 0:
            with self.subscribe(topic) as told, suppress(TimeoutError):
                async with asyncio.timeout(timeout_s):
                    while not done(found := await read()):
                        await told.wait()
                        told.clear()
                    return found
        return await read()

    async def wait_for(self, topic: str, timeout_s: float) -> None:
        """Return once the topic has been told since the last call for it, or after `timeout_s`."""
        event = self.subscribed(topic)
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):  # before Python 3.12, wait_for may swallow a cancellation
                await event.wait()
        event.clear()

    async def next(self, topic: str, timeout_s: float) -> None:
        """Return when the topic is announced, or after `timeout_s`."""
        with self.subscribe(topic) as told, suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await told.wait()

    def subscribed(self, topic: str) -> asyncio.Event:
        """Return an event that stays subscribed, so that nothing is missed between a look and the next wait."""
        if topic not in self._events:
            self._events[topic] = self._subscriptions.enter_context(self.subscribe(topic))
            self._events[topic].set()
        return self._events[topic]

    def unsubscribe(self) -> None:
        """End what stays subscribed."""
        self._subscriptions.close()
        self._events.clear()
