"""Whole answers as server-sent events. `live_answers.py` has those that come while they are drawn."""

import json
from collections.abc import Iterable, Iterator
from typing import Any, Final

from fastapi.responses import StreamingResponse

from tinsmith_openai.answers import Object

DONE: Final = "data: [DONE]\n\n"


def streamed(answer: dict[str, Any], *, include_usage: bool) -> StreamingResponse:  # Any: an answer made here
    """Return the events that say what an answer says."""
    is_chat = answer["object"] == "chat.completion"
    head = {**answer, "object": "chat.completion.chunk" if is_chat else "text_completion"}
    usage = head.pop("usage")
    parts: Iterable[Object] = _chat_parts(answer["choices"]) if is_chat else answer["choices"]
    chunks: list[Object] = [{**head, "choices": [part]} for part in parts]
    if include_usage:
        chunks = [*({**chunk, "usage": None} for chunk in chunks), {**head, "choices": [], "usage": usage}]
    events = (*map(as_event, chunks), DONE)
    return StreamingResponse(iter(events), media_type="text/event-stream")


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
