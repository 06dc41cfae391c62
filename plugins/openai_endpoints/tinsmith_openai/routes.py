"""The routes: `models`, `completions` and `chat/completions`."""

import time
from collections.abc import Callable, Coroutine
from dataclasses import replace
from functools import partial
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse

import tinsmith
from tinsmith.stores import SamplingSessionRecord
from tinsmith_checkpoints.huggingface import Json
from tinsmith_openai import answers, models
from tinsmith_openai.answers import Object
from tinsmith_openai.bodies import ChatRequest, CompletionRequest, SamplingBody
from tinsmith_openai.conversations import Conversation, keep_answer
from tinsmith_openai.drawing import (
    CLIENT_GONE,
    ClientGoneError,
    refuse_many_logprobs,
    sampling_params,
    together,
    unless_gone,
)
from tinsmith_openai.growing_text import GrowingText
from tinsmith_openai.json_pieces import as_json
from tinsmith_openai.live_answers import Hear, Listener, LiveAnswer
from tinsmith_openai.prompts import read_prompts
from tinsmith_openai.refusals import NoSuchModelError
from tinsmith_openai.serving import Serving
from tinsmith_openai.streams import OpenAiEvents, events_of
from tinsmith_openai.text_work import Asker
from tinsmith_openai.texts import ModelText
from tinsmith_openai.tool_calls import Said

_COMPLETION_TOKENS = 16  # OpenAI's default
_STREAMED: dict[type[SamplingBody], tuple[str, str]] = {
    CompletionRequest: ("text_completion", "cmpl"),
    ChatRequest: ("chat.completion.chunk", "chatcmpl"),
}


class Endpoints:
    """One per server. Its routers share everything."""

    def __init__(self, settings: tinsmith.Settings, serving: Serving) -> None:
        self._settings = settings
        self._serving = serving
        self._context = serving.context
        self._started = int(time.time())

    def router(self, prefix: str) -> APIRouter:
        router = APIRouter(prefix=prefix, tags=["openai"], route_class=self._context.json_route)
        known = Depends(self._context.caller)

        @router.get("/models")
        async def list_models(caller: Annotated[tinsmith.Principal, known]) -> Response:
            return JSONResponse({"object": "list", "data": await self._models(caller)})

        @router.get("/models/{name:path}")
        async def get_model(name: str, caller: Annotated[tinsmith.Principal, known]) -> Response:
            found = next((each for each in await self._models(caller) if each["id"] == name), None)
            if found is None:
                msg = f"no model named {name!r}; GET {prefix}/models lists those that there are"
                raise NoSuchModelError(msg)
            return JSONResponse(found)

        @router.post("/completions")
        async def completions(
            body: CompletionRequest, request: Request, caller: Annotated[tinsmith.Principal, known]
        ) -> Response:
            session, text = await self._serving.opened(caller, body.model)
            answer = partial(self._complete, caller, body, len(await request.body()), session, text)
            return await self._answered(request, caller, body, text, answer)

        @router.post("/chat/completions")
        async def chat(body: ChatRequest, request: Request, caller: Annotated[tinsmith.Principal, known]) -> Response:
            session, text = await self._serving.opened(caller, body.model)
            answer = partial(self._chat, caller, body, len(await request.body()), session, text)
            return await self._answered(request, caller, body, text, answer)

        return router

    async def _models(self, caller: tinsmith.Principal) -> list[Object]:
        return await models.listed_models(self._settings, self._context, caller, started=self._started)

    async def _answered(
        self,
        request: Request,
        caller: tinsmith.Principal,
        body: SamplingBody,
        text: ModelText,
        answer: Callable[[Listener | None], Coroutine[Any, Any, Object]],
    ) -> Response:
        """Answer when everything is drawn, or with the first token, if a client reads them as they come.

        Until then, what fails has the status of its error.
        """
        try:
            if body.streams_by_token:
                head = answers.head(*_STREAMED[type(body)], body.model)
                form = OpenAiEvents(head, include_usage=body.stream_options.include_usage)
                growing = partial(GrowingText, text, body.stop_strings, marks=isinstance(body, ChatRequest))
                return await LiveAnswer(form, answer, growing).response(request)
            return await unless_gone(request, self._written(caller, body, answer))
        except ClientGoneError:
            return Response(status_code=CLIENT_GONE)

    async def _written(
        self,
        caller: tinsmith.Principal,
        body: SamplingBody,
        answer: Callable[[Listener | None], Coroutine[Any, Any, Object]],
    ) -> Response:
        whole, work = await answer(None), self._serving.work
        size = _size(body, whole["usage"])
        if body.stream:
            write = partial(events_of, whole, include_usage=body.stream_options.include_usage)
            return StreamingResponse(iter(await work.run(caller.tenant, size, write)), media_type="text/event-stream")
        return Response(await work.run(caller.tenant, size, partial(as_json, whole)), media_type="application/json")

    # /completions

    async def _complete(
        self,
        caller: tinsmith.Principal,
        body: CompletionRequest,
        num_bytes: int,
        session: SamplingSessionRecord,
        text: ModelText,
        listener: Listener | None = None,
    ) -> Object:
        window = await self._serving.window(session, num_bytes)
        read = partial(read_prompts, text, body, window)
        prompts = await self._serving.work.run(caller.tenant, num_bytes, read)
        if body.logprobs is not None:
            most = _COMPLETION_TOKENS if body.max_tokens is None else body.max_tokens
            shown = sum(map(len, prompts)) if body.echo else 0
            refuse_many_logprobs(body.n * (shown + most * len(prompts)), body.logprobs)
        asked = [self._completion(session, body, prompt, index) for index, prompt in enumerate(prompts)]
        heard = [None if listener is None else _from(listener.hear, at * body.n) for at in range(len(prompts))]
        outputs = await together(
            self._serving.sample(caller, session, each, of_prompt) for each, of_prompt in zip(asked, heard, strict=True)
        )
        if body.max_tokens == 0:
            outputs = [_nothing_drawn(output) for output in outputs]
        usage = answers.usage(prompts, outputs)

        def build(asker: Asker) -> Object:
            choices: list[Json] = []
            for prompt, output in zip(prompts, outputs, strict=True):
                for sequence in output.sequences:
                    asker.check()
                    choice = _completion_choice(text, body, prompt, output, sequence)
                    choices.append({"index": len(choices), **choice})
                    if listener is not None:
                        listener.texts.append(str(choice["text"]))
            return {
                **answers.head("text_completion", "cmpl", body.model),
                "choices": choices,
                "usage": usage,
            }

        return await self._serving.work.run(caller.tenant, _size(body, usage) * (body.n if body.echo else 1), build)

    def _completion(
        self, session: SamplingSessionRecord, body: CompletionRequest, prompt: tinsmith.TokenArray, index: int
    ) -> tinsmith.Sample:
        scores_prompt = body.echo and body.logprobs is not None
        return tinsmith.Sample(
            sampling_session_id=session.sampling_session_id,
            snapshot_id=session.snapshot_id,
            prompt_P=prompt,
            # nothing but scores: one token is drawn, and not shown
            params=sampling_params(
                body, max_tokens=_COMPLETION_TOKENS if body.max_tokens is None else body.max_tokens or 1, index=index
            ),
            num_samples=body.n,
            prompt_logprobs=scores_prompt,
            topk_prompt_logprobs=body.logprobs or 0 if scores_prompt else 0,
            topk_sample_logprobs=body.logprobs or 0,
        )

    # /chat/completions

    async def _chat(
        self,
        caller: tinsmith.Principal,
        body: ChatRequest,
        num_bytes: int,
        session: SamplingSessionRecord,
        text: ModelText,
        listener: Listener | None = None,
    ) -> Object:
        _, asked = await self._serving.read(caller, session, text, lambda: body, num_bytes)
        hear = None
        if listener is not None:
            listener.reading, hear = asked.reading, listener.hear
        output = await self._serving.draw_chat(caller, body, session, asked, hear)
        usage = answers.usage([asked.tokens], [output])

        def build(asker: Asker) -> Object:
            choices: list[Json] = []
            texts: list[str] = []
            for index, sequence in enumerate(output.sequences):
                asker.check()
                tokens = answers.tokens_of(sequence)
                texts.append(answers.finished_text(text, tokens, body.stop_strings, marks=True))
                said = asked.reading.read(index, texts[-1])
                choice = self._chat_choice(text, caller.tenant, body, asked, said, sequence)
                choices.append({"index": index, **choice})
            if listener is not None:
                listener.texts = texts
            answer: Object = {
                **answers.head("chat.completion", "chatcmpl", body.model),
                "choices": choices,
                "usage": usage,
            }
            if body.return_token_ids:
                answer["prompt_token_ids"] = answers.as_list(asked.tokens)
            return answer

        return await self._serving.work.run(caller.tenant, _size(body, usage), build)

    def _chat_choice(
        self,
        text: ModelText,
        tenant: str,
        body: ChatRequest,
        asked: Conversation,
        said: Said,
        sequence: tinsmith.SampledSequence,
    ) -> Object:
        tokens = answers.tokens_of(sequence)
        message = answers.chat_message(said)
        if text.is_special(tokens[-1]):  # the model has ended its turn itself
            keep_answer(self._serving.transcripts, tenant, asked, body, message, tokens)
        return {
            "message": message,
            "finish_reason": "tool_calls" if said.ends_with_call else sequence.stop_reason,
            "logprobs": answers.chat_logprobs(text, sequence, body.top_logprobs) if body.logprobs else None,
            **({"token_ids": answers.as_list(tokens)} if body.return_token_ids else {}),
        }


def _from(hear: Hear, first: int) -> Hear:
    """Return what hears a prompt's sequences, of which the first one is that choice."""
    return lambda sequence, tokens: hear(first + sequence, tokens)


def _size(body: SamplingBody, usage: Any) -> int:  # Any: of an answer made here
    """Return a measure of the work of writing an answer: its tokens, and several times as much for each logprob."""
    top = body.top_logprobs if isinstance(body, ChatRequest) and body.logprobs else None
    if isinstance(body, CompletionRequest):
        top = body.logprobs
    logprobs = 0 if top is None else 4 * (1 + top)
    return int(usage["total_tokens"]) * (1 + logprobs)


def _nothing_drawn(output: tinsmith.SampleOutput) -> tinsmith.SampleOutput:
    """Return the output without the token that was drawn so that the prompt is scored."""
    empty = [
        replace(
            each,
            tokens=each.tokens[:0],
            logprobs=each.logprobs[:0],
            stop_reason="length",
            top_logprobs=None
            if each.top_logprobs is None
            else tinsmith.TopLogprobs(
                token_ids=each.top_logprobs.token_ids[:0], logprobs=each.top_logprobs.logprobs[:0]
            ),
        )
        for each in output.sequences
    ]
    return replace(output, sequences=tuple(empty))


def _completion_choice(
    text: ModelText,
    body: CompletionRequest,
    prompt: tinsmith.TokenArray,
    output: tinsmith.SampleOutput,
    sequence: tinsmith.SampledSequence,
) -> Object:
    tokens = answers.tokens_of(sequence)
    said = answers.finished_text(text, tokens, body.stop_strings)
    choice: Object = {
        "text": text.decode(prompt.tolist()) + said if body.echo else said,
        "finish_reason": sequence.stop_reason,
        "logprobs": None,
    }
    if body.logprobs is not None:
        shown, scores = list[int](), answers.numbers(sequence.logprobs)
        tops = answers.best_tokens(text, sequence.top_logprobs, len(tokens))
        if body.echo and output.prompt_logprobs is not None:
            shown, scores = prompt.tolist(), [*answers.numbers(output.prompt_logprobs), *scores]
            tops = [*answers.best_tokens(text, output.top_prompt_logprobs, len(prompt)), *tops]
            tops[0] = None  # nothing predicts the first token
        choice["logprobs"] = answers.completion_logprobs(text, shown, tokens, scores, tops)
    if body.return_token_ids:
        choice |= {"prompt_token_ids": answers.as_list(prompt), "token_ids": answers.as_list(tokens)}
    return choice
