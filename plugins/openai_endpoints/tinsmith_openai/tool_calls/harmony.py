"""The channels of gpt-oss: reasoning, calls and text are messages of one answer."""

import re
from collections.abc import Callable
from typing import Final

from tinsmith_openai.tool_calls.answers import Calls
from tinsmith_openai.tool_calls.events import Content, Event, Reasoning
from tinsmith_openai.tool_calls.source import Parse, Source

MARKS: Final = ("<|start|>", "<|channel|>", "<|constrain|>", "<|message|>", "<|end|>", "<|call|>", "<|return|>")
_ENDS: Final = ("<|end|>", "<|call|>", "<|return|>", "<|start|>")
_RECIPIENT: Final = re.compile(r"to=([^\s<]+)")
_CHANNEL: Final = re.compile(r"<\|channel\|>\s*(\w+)")


def harmony(source: Source, calls: Calls) -> Parse[bool]:
    """Read an answer behind `<|start|>assistant`. Text without a channel stays text."""
    yield from source.space()
    if (yield from source.ahead("to=")) is not None and not (yield from _headed(source, calls)):
        return True
    while True:
        mark = yield from source.text_until(MARKS, Content)
        if mark is None:
            return True
        if mark in {"<|start|>", "<|channel|>"}:
            source.at -= len(mark)
            if not (yield from _headed(source, calls)):
                return True


def _headed(source: Source, calls: Calls) -> Parse[bool]:
    """Read a message with its head. False if the text ends before: then nothing was said."""
    head = yield from source.until("<|message|>")
    if head is None:
        return False
    yield from source.literal("<|message|>")
    yield from _message(source, calls, head)
    return True


def _message(source: Source, calls: Calls, head: str) -> Parse[None]:
    recipient, channel = _RECIPIENT.search(head), _CHANNEL.search(head)
    name = recipient[1].removeprefix("functions.") if recipient else ""
    emit: Callable[[str], Event] = Content
    if calls.tools and (name in calls.tools or (recipient and recipient[1].startswith("functions."))):
        yield calls.begin(name)
        emit = calls.arguments
    elif channel is not None and channel[1] == "analysis":
        yield Reasoning("")
        emit = Reasoning
    mark = yield from source.text_until(_ENDS, emit)
    if mark == "<|start|>":
        source.at -= len(mark)
