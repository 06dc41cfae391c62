"""The JSON of Anthropic's answers, and their events."""

import json
import secrets
from collections.abc import Iterable, Iterator
from typing import Any, Final

import tinsmith
from tinsmith_checkpoints.huggingface import Json
from tinsmith_openai.answers import Object, as_list
from tinsmith_openai.live_answers import EventForm, RewrittenTextError
from tinsmith_openai.messages.bodies import MessagesRequest
from tinsmith_openai.texts import ModelText
from tinsmith_openai.tool_calls import CallArguments, CallBegins, Content, Event, Reasoning, Said

Message = dict[str, Any]  # Any: an answer made here

_PING: Final[Object] = {"type": "ping"}


def message_start(body: MessagesRequest, num_prompt: int) -> Object:
    """Return a message that says nothing yet."""
    return {
        "id": f"msg_{secrets.token_hex(12)}",
        "type": "message",
        "role": "assistant",
        "model": body.model,
        "content": [],
        "stop_reason": None,
        "stop_sequence": None,
        "usage": {"input_tokens": num_prompt, "output_tokens": 0},
        **({} if body.context_management is None else {"context_management": {"applied_edits": []}}),
    }


def usage(num_prompt: int, output: tinsmith.SampleOutput) -> Object:
    """Return the numbers of tokens. `input_tokens` are those that did not come from the cache."""
    cached = output.prompt_cache_hit_tokens
    return {
        "input_tokens": num_prompt - cached,
        "cache_read_input_tokens": cached,
        "cache_creation_input_tokens": 0,
        "output_tokens": sum(len(sequence.tokens) for sequence in output.sequences),
    }


def content(said: Said) -> list[Json]:
    thought: list[Json] = [{"type": "thinking", "thinking": said.reasoning, "signature": ""}] if said.reasoning else []
    text: list[Json] = [{"type": "text", "text": said.content}] if said.content or not said.calls else []
    used: list[Json] = [
        {"type": "tool_use", "id": call.id, "name": call.name, "input": json.loads(call.arguments)}
        for call in said.calls
    ]
    return [*thought, *text, *used]


def stop_reason(text: ModelText, body: MessagesRequest, sequence: tinsmith.SampledSequence, said: Said) -> Object:
    """Say why a message ended, and which stop string ended it."""
    if said.calls:
        return {"stop_reason": "tool_use", "stop_sequence": None}
    whole = text.decode([int(token) for token in sequence.tokens], marks=True)
    found = min(((at, stop) for stop in body.stop_sequences if (at := whole.find(stop)) >= 0), default=None)
    if found is not None:
        return {"stop_reason": "stop_sequence", "stop_sequence": found[1]}
    reason = "max_tokens" if sequence.stop_reason == "length" else "end_turn"
    return {"stop_reason": reason, "stop_sequence": None}


def token_ids(prompt: tinsmith.TokenArray, sequence: tinsmith.SampledSequence) -> Object:
    return {"prompt_token_ids": as_list(prompt), "token_ids": as_list(sequence.tokens)}


class MessageEvents(EventForm[Message]):
    """Of one message, in blocks: thoughts, text, and calls, in the order in which the model writes them."""

    def __init__(self, start: Object) -> None:
        self._start = start
        self._said = Said()
        self._index = -1
        self._kind: str | None = None  # of the block that is open

    def begin(self, index: int) -> Iterable[str]:
        del index
        yield _event({"type": "message_start", "message": self._start})
        yield _event(_PING)

    def said(self, index: int, what: Event) -> Iterable[str]:
        del index
        self._said.add(what)
        match what:
            case Content(text):
                yield from self._opened("text", {"text": ""})
                yield _delta(self._index, {"type": "text_delta", "text": text})
            case Reasoning(text):
                yield from self._opened("thinking", {"thinking": "", "signature": ""})
                yield _delta(self._index, {"type": "thinking_delta", "thinking": text})
            case CallBegins():
                yield from self._closed()
                yield from self._opened("tool_use", {"id": what.id, "name": what.name, "input": {}})
            case CallArguments():
                yield _delta(self._index, {"type": "input_json_delta", "partial_json": what.text})

    def end_of_choice(self, whole: Message, index: int) -> Iterable[str]:
        del index
        broken = next((call for call in self._said.calls if not call.has_object), None)
        if broken is not None and whole["stop_reason"] != "max_tokens":
            msg = (
                f"the arguments of the call of {broken.name!r} are no JSON object; without `stream`, they come as text"
            )
            raise RewrittenTextError(msg)
        if self._index < 0:
            yield from self._opened("text", {"text": ""})
        yield from self._closed()

    def end(self, whole: Message) -> Iterable[str]:
        return _end(whole)

    def failure(self, message: str) -> str:
        return _event({"type": "error", "error": {"type": "api_error", "message": message}})

    def _opened(self, kind: str, block: Object) -> Iterable[str]:
        """Open a block, unless one of its kind is open."""
        if self._kind == kind:
            return
        yield from self._closed()
        self._index, self._kind = self._index + 1, kind
        yield _block_start(self._index, {"type": kind, **block})

    def _closed(self) -> Iterable[str]:
        if self._kind is not None:
            self._kind = None
            yield _event({"type": "content_block_stop", "index": self._index})


def events_of(start: Object, whole: Message) -> Iterator[str]:
    """Yield the events of a finished message, each of whose blocks comes in one piece."""
    more = {name: value for name, value in whole.items() if name in {"prompt_token_ids", "token_ids"}}
    yield _event({"type": "message_start", "message": {**start, **more}})
    yield _event(_PING)
    for index, block in enumerate(whole["content"]):
        if block["type"] == "text":
            yield _block_start(index, {"type": "text", "text": ""})
            yield _delta(index, {"type": "text_delta", "text": block["text"]})
        elif block["type"] == "thinking":
            yield _block_start(index, {**block, "thinking": ""})
            yield _delta(index, {"type": "thinking_delta", "thinking": block["thinking"]})
        else:
            yield _block_start(index, {**block, "input": {}})
            yield _delta(index, {"type": "input_json_delta", "partial_json": json.dumps(block["input"])})
        yield _event({"type": "content_block_stop", "index": index})
    yield from _end(whole)


def _end(whole: Message) -> Iterator[str]:
    delta: Object = {name: whole[name] for name in ("stop_reason", "stop_sequence")}
    yield _event({"type": "message_delta", "delta": delta, "usage": whole["usage"]})
    yield _event({"type": "message_stop"})


def _block_start(index: int, block: Object) -> str:
    return _event({"type": "content_block_start", "index": index, "content_block": block})


def _delta(index: int, delta: Object) -> str:
    return _event({"type": "content_block_delta", "index": index, "delta": delta})


def _event(event: Object) -> str:
    return f"event: {event['type']}\ndata: {json.dumps(event)}\n\n"
