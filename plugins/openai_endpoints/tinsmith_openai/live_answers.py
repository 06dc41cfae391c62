"""Answers as server-sent events that come while they are drawn, in the form of any API."""

import asyncio
import logging
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Iterator, Sequence
from typing import Any, Final, Generic, TypeVar

from fastapi import Request
from fastapi.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from tinsmith import TinsmithError, log_privately
from tinsmith_openai.drawing import unless_gone
from tinsmith_openai.growing_text import GrowingText
from tinsmith_openai.tool_calls import AnswerReader, Content, Event, Reading

_log = logging.getLogger(__name__)

Whole = TypeVar("Whole")

Hear = Callable[[int, Sequence[int]], None]
"""Called with the index of a choice, and its next tokens."""


class Listener:
    """Hears an answer while it is drawn."""

    def __init__(self, hear: Hear) -> None:
        self.hear = hear
        self.reading: Reading | None = None
        """What reads the choices; set before their first tokens. None: all is text."""
        self.texts: list[str] = []
        """The whole text of each choice; set when all is drawn."""


_ENDED: Final = None


class EventForm(ABC, Generic[Whole]):
    """How an API reports drawn text in events. `Whole`: the API's complete answer."""

    @abstractmethod
    def begin(self, index: int) -> Iterable[str]:
        """Return the events before the first text of a choice."""

    @abstractmethod
    def said(self, index: int, what: Event) -> Iterable[str]:
        """Return the events that add something to a choice."""

    @abstractmethod
    def end_of_choice(self, whole: Whole, index: int) -> Iterable[str]:
        """Return the events that say why a choice ended. Raise RewrittenTextError if it is not what was sent."""

    @abstractmethod
    def end(self, whole: Whole) -> Iterable[str]:
        """Return the events behind all choices."""

    @abstractmethod
    def failure(self, message: str) -> str:
        """Return the event that says that there will be no more."""


class LiveAnswer(Generic[Whole]):
    """Sends the text of choices as their tokens come. The whole answer says how they end.

    An answer that fails before its first token raises. Later, its last event is the error.
    """

    def __init__(
        self,
        form: EventForm[Whole],
        answer: Callable[[Listener], Coroutine[Any, Any, Whole]],
        make_text: Callable[[], GrowingText],
    ) -> None:
        self._form = form
        self._make_text = make_text
        self._heard = asyncio.Queue[tuple[int, Sequence[int]] | None]()
        self._choices: dict[int, _Choice] = {}
        self._listener = Listener(lambda index, tokens: self._heard.put_nowait((index, tokens)))
        self._answer = asyncio.ensure_future(answer(self._listener))
        self._answer.add_done_callback(lambda _: self._heard.put_nowait(_ENDED))

    async def response(self, request: Request) -> Response:
        """Return the response once there is a token, or everything. Raise ClientGoneError if the client leaves."""
        try:
            return await unless_gone(request, self._begun())
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """End the drawing. An answer that has ended stays as it is."""
        self._answer.cancel()

    async def _begun(self) -> Response:
        first = await self._heard.get()
        if first is _ENDED:
            self._answer.result()
        return _ClosingResponse(self._events(first), self.close)

    async def _events(self, heard: tuple[int, Sequence[int]] | None) -> AsyncIterator[str]:
        try:
            while heard is not _ENDED:
                for event in self._grown(*heard):
                    yield event
                heard = await self._heard.get()
            for event in self._last(self._answer.result()):
                yield event
        except Exception as error:  # noqa: BLE001 - whatever fails, such as a tokenizer: the client must learn of it
            yield self._form.failure(_told(error))

    def _grown(self, index: int, tokens: Sequence[int]) -> Iterator[str]:
        if index not in self._choices:
            yield from self._begin(index)
        choice = self._choices[index]
        yield from self._told(index, choice.add(choice.text.add(tokens)))

    def _begin(self, index: int) -> Iterable[str]:
        reading = self._listener.reading
        self._choices[index] = _Choice(self._make_text(), None if reading is None else reading.reader(index))
        return self._form.begin(index)

    def _told(self, index: int, said: Iterable[Event]) -> Iterator[str]:
        for each in said:
            yield from self._form.said(index, each)

    def _last(self, whole: Whole) -> Iterator[str]:
        for index, text in enumerate(self._listener.texts):
            if index not in self._choices:
                yield from self._begin(index)
            choice = self._choices[index]
            if not text.startswith(choice.sent):
                msg = (
                    f"the text of choice {index} is {text!r}, and {choice.sent!r} was sent; ask again without `stream`"
                )
                raise RewrittenTextError(msg)
            yield from self._told(index, choice.add(text[len(choice.sent) :]))
            yield from self._told(index, choice.end())
            yield from self._form.end_of_choice(whole, index)
        yield from self._form.end(whole)


class _Choice:
    """What was drawn of one choice so far."""

    def __init__(self, text: GrowingText, reader: AnswerReader | None) -> None:
        self.text = text
        self.sent = ""
        self._reader = reader

    def add(self, said: str) -> list[Event]:
        self.sent += said
        if self._reader is not None:
            return self._reader.add(said)
        return [Content(said)] if said else []

    def end(self) -> list[Event]:
        return [] if self._reader is None else self._reader.end()


class _ClosingResponse(StreamingResponse):
    """Closes its source when the answer has been sent or cannot be, even if no event was requested."""

    def __init__(self, events: AsyncIterator[str], close: Callable[[], None]) -> None:
        super().__init__(events, media_type="text/event-stream")
        self._close = close

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._close()


class RewrittenTextError(TinsmithError):
    """What was sent is not how the answer begins: a tokenizer writes it in another way, or it has no such form."""

    public = True


def _told(error: Exception) -> str:
    if isinstance(error, TinsmithError) and (error.public or error.http_status < 500):
        return str(error)
    return f"the answer failed ({log_privately(_log, 'a streamed answer failed', error=error)})"
