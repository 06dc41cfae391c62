"""The routes of Anthropic's API: `messages` and `messages/count_tokens`."""

from functools import partial
from typing import Annotated

from fastapi import APIRouter, Depends, Header, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse

import tinsmith
from tinsmith.stores import SamplingSessionRecord
from tinsmith_openai.answers import chat_message, finished_text, tokens_of
from tinsmith_openai.bodies import ChatRequest
from tinsmith_openai.conversations import Conversation, keep_answer
from tinsmith_openai.drawing import CLIENT_GONE, ClientGoneError, unless_gone
from tinsmith_openai.growing_text import GrowingText
from tinsmith_openai.live_answers import Listener, LiveAnswer
from tinsmith_openai.messages import answers
from tinsmith_openai.messages.bodies import CountTokensRequest, MessagesRequest
from tinsmith_openai.serving import Serving
from tinsmith_openai.texts import ModelText
from tinsmith_openai.tool_calls import Said

_VERSIONS = ("2023-06-01", "2026-10-21")  # what clients of Anthropic's have sent


def messages_router(serving: Serving, prefix: str) -> APIRouter:
    router = APIRouter(
        prefix=prefix,
        tags=["anthropic"],
        route_class=serving.context.json_route,
        dependencies=[Depends(_check_version)],
    )
    known = Depends(serving.context.caller)

    @router.post("/messages")
    async def messages(
        body: MessagesRequest, request: Request, caller: Annotated[tinsmith.Principal, known]
    ) -> Response:
        session, text = await serving.opened(caller, body.model)
        read = serving.read(caller, session, text, body.chat, len(await request.body()))
        try:
            chat, asked = await unless_gone(request, read)
            drawn = _Drawn(serving, caller, body, chat, session, text, asked)
            return await drawn.answered(request)
        except ClientGoneError:
            return Response(status_code=CLIENT_GONE)

    @router.post("/messages/count_tokens")
    async def count_tokens(
        body: CountTokensRequest, request: Request, caller: Annotated[tinsmith.Principal, known]
    ) -> Response:
        session, text = await serving.opened(caller, body.model)
        read = serving.read(caller, session, text, body.chat, len(await request.body()))
        try:
            _, asked = await unless_gone(request, read)
        except ClientGoneError:
            return Response(status_code=CLIENT_GONE)
        return JSONResponse({"input_tokens": len(asked.tokens)})

    return router


async def _check_version(anthropic_version: Annotated[str | None, Header()] = None) -> None:
    if anthropic_version is not None and anthropic_version not in _VERSIONS:
        msg = f"anthropic-version {anthropic_version[:100]!r} is not offered; send {', '.join(_VERSIONS)}"
        raise tinsmith.UserError(msg)


class _Drawn:
    """The answer to one request."""

    def __init__(
        self,
        serving: Serving,
        caller: tinsmith.Principal,
        body: MessagesRequest,
        chat: ChatRequest,
        session: SamplingSessionRecord,
        text: ModelText,
        asked: Conversation,
    ) -> None:
        self._serving = serving
        self._caller = caller
        self._body = body
        self._chat = chat
        self._session = session
        self._text = text
        self._asked = asked
        self._start = answers.message_start(body, len(asked.tokens))

    async def answered(self, request: Request) -> Response:
        """Answer when everything is drawn, or with the first token, if the client reads them as they come."""
        if self._chat.streams_by_token:
            growing = partial(GrowingText, self._text, self._chat.stop_strings, marks=True)
            return await LiveAnswer(answers.MessageEvents(self._start), self._whole, growing).response(request)
        whole = await unless_gone(request, self._whole(None))
        if self._chat.stream:
            return StreamingResponse(answers.events_of(self._start, whole), media_type="text/event-stream")
        return JSONResponse(whole)

    async def _whole(self, listener: Listener | None) -> answers.Message:
        hear = None
        if listener is not None:
            listener.reading, hear = self._asked.reading, listener.hear
        output = await self._serving.draw_chat(self._caller, self._chat, self._session, self._asked, hear)
        (sequence,) = output.sequences
        size = len(self._asked.tokens) + len(sequence.tokens)
        return await self._serving.work.run(
            self._caller.tenant, size, lambda _: self._message(sequence, output, listener)
        )

    def _message(
        self, sequence: tinsmith.SampledSequence, output: tinsmith.SampleOutput, listener: Listener | None
    ) -> answers.Message:
        asked, body = self._asked, self._body
        tokens = tokens_of(sequence)
        whole = finished_text(self._text, tokens, self._chat.stop_strings, marks=True)
        if listener is not None:
            listener.texts = [whole]
        said = self._said(whole)
        if self._text.is_special(tokens[-1]):  # the model has ended its turn itself
            answer = chat_message(said)
            keep_answer(self._serving.transcripts, self._caller.tenant, asked, self._chat, answer, tokens)
        return {
            **self._start,
            "content": answers.content(said),
            **answers.stop_reason(self._text, body, sequence, said),
            "usage": answers.usage(len(asked.tokens), output),
            **(answers.token_ids(asked.tokens, sequence) if body.return_token_ids else {}),
        }

    def _said(self, whole: str) -> Said:
        """Return text and calls. A call whose arguments are no object stays text: there is no block for it."""
        said = self._asked.reading.read(0, whole)
        return said if all(call.has_object for call in said.calls) else Said(content=whole)
