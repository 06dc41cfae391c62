"""Answers as server-sent events that come while they are drawn."""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from typing import Any, Final

from fastapi.responses import StreamingResponse

from tinsmith import TinsmithError, log_privately
from tinsmith.huggingface import Json
from tinsmith_openai.answers import Object
from tinsmith_openai.growing_text import GrowingText
from tinsmith_openai.streams import DONE, as_event

_log = logging.getLogger(__name__)

Hear = Callable[[int, Sequence[int]], None]
"""Called with the index of a choice, and its next tokens."""

_ENDED: Final = None


class LiveAnswer:
    """Sends the text of choices as their tokens come. The whole answer says how they end.

    An answer that fails before its first token raises. Later, its last event is the error, and `[DONE]` does not come.
    """

    def __init__(
        self,
        head: Object,
        answer: Callable[[Hear], Coroutine[Any, Any, dict[str, Any]]],  # Any: an answer made here
        make_text: Callable[[], GrowingText],
        *,
        include_usage: bool,
    ) -> None:
        self._head = head
        self._is_chat = head["object"] == "chat.completion.chunk"
        self._make_text = make_text
        self._include_usage = include_usage
        self._heard = asyncio.Queue[tuple[int, Sequence[int]] | None]()
        self._texts: dict[int, GrowingText] = {}  # by choice
        self._sent: dict[int, str] = {}
        self._answer = asyncio.ensure_future(answer(lambda index, tokens: self._heard.put_nowait((index, tokens))))
        self._answer.add_done_callback(lambda _: self._heard.put_nowait(_ENDED))

    async def response(self) -> StreamingResponse:
        """Return the response once there is a token, or everything."""
        try:
            first = await self._heard.get()
            if first is _ENDED:
                self._answer.result()
        except BaseException:
            self._answer.cancel()
            raise
        return StreamingResponse(self._events(first), media_type="text/event-stream")

    async def _events(self, heard: tuple[int, Sequence[int]] | None) -> AsyncIterator[str]:
        try:
            while heard is not _ENDED:
                for event in self._grown(*heard):
                    yield event
                heard = await self._heard.get()
            for event in self._last(self._answer.result()):
                yield event
            yield DONE
        except TinsmithError as error:
            yield as_event({"error": {"message": _told(error), "type": "server_error", "param": None, "code": None}})
        finally:  # the client may have gone away
            self._answer.cancel()

    def _grown(self, index: int, tokens: Sequence[int]) -> Iterator[str]:
        if index not in self._texts:
            yield from self._begin(index)
        if said := self._texts[index].add(tokens):
            self._sent[index] += said
            yield self._chunk(index, said)

    def _begin(self, index: int) -> Iterator[str]:
        self._texts[index], self._sent[index] = self._make_text(), ""
        if self._is_chat:
            yield self._event({"index": index, "delta": {"role": "assistant", "content": ""}})

    def _last(self, whole: dict[str, Any]) -> Iterator[str]:
        for choice in whole["choices"]:
            index, text = choice["index"], choice["message"]["content"] if self._is_chat else choice["text"]
            if index not in self._texts:
                yield from self._begin(index)
            sent = self._sent[index]
            if not text.startswith(sent):
                msg = f"the text of choice {index} is {text!r}, and {sent!r} was sent; ask again without `stream`"
                raise RewrittenTextError(msg)
            yield self._chunk(index, text[len(sent) :], finish_reason=choice["finish_reason"])
        if self._include_usage:
            yield as_event({**self._head, "choices": [], "usage": whole["usage"]})

    def _chunk(self, index: int, text: str, *, finish_reason: str | None = None) -> str:
        said: Object = {"delta": {"content": text} if text else {}} if self._is_chat else {"text": text}
        return self._event({"index": index, **said, "finish_reason": finish_reason})

    def _event(self, choice: Object) -> str:
        choices: list[Json] = [{"finish_reason": None, "logprobs": None, **choice}]
        usage: Object = {"usage": None} if self._include_usage else {}
        return as_event({**self._head, "choices": choices, **usage})


class RewrittenTextError(TinsmithError):
    """The tokenizer writes a beginning of some tokens otherwise than all of them."""

    public = True


def _told(error: TinsmithError) -> str:
    if error.public or error.http_status < 500:
        return str(error)
    return f"the answer failed ({log_privately(_log, 'a streamed answer failed', error=error)})"
