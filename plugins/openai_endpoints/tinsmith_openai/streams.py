"""OpenAI's server-sent events: of whole answers, and of those that come while they are drawn."""

import json
from collections.abc import Iterable, Iterator
from typing import Any, Final

from tinsmith_checkpoints.huggingface import Json
from tinsmith_openai.answers import Object
from tinsmith_openai.json_pieces import as_json
from tinsmith_openai.live_answers import EventForm
from tinsmith_openai.text_work import Asker
from tinsmith_openai.tool_calls import CallArguments, CallBegins, Content, Event, Reasoning

DONE: Final = "data: [DONE]\n\n"

Answer = dict[str, Any]  # Any: an answer made here


class OpenAiEvents(EventForm[Answer]):
    """`[DONE]` ends an answer that has not failed."""

    def __init__(self, head: Object, *, include_usage: bool) -> None:
        self._head = head
        self._is_chat = head["object"] == "chat.completion.chunk"
        self._include_usage = include_usage

    def begin(self, index: int) -> Iterable[str]:
        return [self._event({"index": index, "delta": {"role": "assistant", "content": ""}})] if self._is_chat else []

    def said(self, index: int, what: Event) -> Iterable[str]:
        if not self._is_chat:
            assert isinstance(what, Content), "completions are text"
            return [self._event({"index": index, "text": what.text})]
        return [self._event({"index": index, "delta": _delta(what)})]

    def end_of_choice(self, whole: Answer, index: int) -> Iterable[str]:
        nothing: Object = {"delta": {}} if self._is_chat else {"text": ""}
        reason = whole["choices"][index]["finish_reason"]
        return [self._event({"index": index, **nothing, "finish_reason": reason})]

    def end(self, whole: Answer) -> Iterable[str]:
        if self._include_usage:
            yield as_event({**self._head, "choices": [], "usage": whole["usage"]})
        yield DONE

    def failure(self, message: str) -> str:
        return as_event({"error": {"message": message, "type": "server_error", "param": None, "code": None}})

    def _event(self, choice: Object) -> str:
        choices: list[Json] = [{"finish_reason": None, "logprobs": None, **choice}]
        usage: Object = {"usage": None} if self._include_usage else {}
        return as_event({**self._head, "choices": choices, **usage})


def _delta(what: Event) -> Object:
    match what:
        case Content(text):
            return {"content": text}
        case Reasoning(text):
            return {"reasoning_content": text}
        case CallBegins():
            function: Object = {"name": what.name, "arguments": ""}
            return {"tool_calls": [{"index": what.index, "id": what.id, "type": "function", "function": function}]}
        case CallArguments():
            return {"tool_calls": [{"index": what.index, "function": {"arguments": what.text}}]}


def events_of(answer: Answer, asker: Asker, *, include_usage: bool) -> list[str]:
    """Return the events of a finished answer."""
    is_chat = answer["object"] == "chat.completion"
    head = {**answer, "object": "chat.completion.chunk" if is_chat else "text_completion"}
    usage = head.pop("usage")
    parts: Iterable[Object] = _chat_parts(answer["choices"]) if is_chat else answer["choices"]
    chunks: list[Object] = [{**head, "choices": [part]} for part in parts]
    if include_usage:
        chunks = [*({**chunk, "usage": None} for chunk in chunks), {**head, "choices": [], "usage": usage}]
    return [*(f"data: {as_json(chunk, asker)}\n\n" for chunk in chunks), DONE]


def as_event(chunk: Object) -> str:
    return f"data: {json.dumps(chunk)}\n\n"


def _chat_parts(choices: Iterable[dict[str, Any]]) -> Iterator[Object]:
    """Yield what was said, and then why it ended, for each choice."""
    for choice in choices:
        said = dict(choice["message"])
        if "tool_calls" in said:
            said["tool_calls"] = [{"index": index, **call} for index, call in enumerate(said["tool_calls"])]
        rest = {name: value for name, value in choice.items() if name != "message"}
        yield {**rest, "delta": said, "finish_reason": None}
        yield {"index": choice["index"], "delta": {}, "finish_reason": choice["finish_reason"], "logprobs": None}
