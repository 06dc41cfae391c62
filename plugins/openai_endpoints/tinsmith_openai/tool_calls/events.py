"""What a model says, piece by piece: reasoning, text, and calls of tools."""

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import groupby

from tinsmith_checkpoints.huggingface import Json, check_depth


@dataclass(frozen=True, slots=True)
class Reasoning:
    text: str


@dataclass(frozen=True, slots=True)
class Content:
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CallBegins:
    index: int
    id: str
    name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CallArguments:
    """More of the JSON of a call's arguments."""

    index: int
    text: str


Event = Reasoning | Content | CallBegins | CallArguments


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCall:
    name: str
    arguments: str  # JSON, unless the model broke off or wrote something else
    id: str

    @property
    def has_object(self) -> bool:
        """Whether the arguments are a JSON object, as they should be."""
        return isinstance(parsed(self.arguments), dict)


@dataclass(slots=True)
class Said:
    """All that a model said."""

    content: str = ""
    reasoning: str = ""
    calls: list[ToolCall] = field(default_factory=list)

    @property
    def ends_with_call(self) -> bool:
        """Whether there are calls, and the last one is complete."""
        return bool(self.calls) and self.calls[-1].has_object

    def add(self, event: Event) -> None:
        match event:
            case Content(text):
                self.content += text
            case Reasoning(text):
                self.reasoning += text
            case CallBegins():
                self.calls.append(ToolCall(name=event.name, arguments="", id=event.id))
            case CallArguments():
                call = self.calls[event.index]
                self.calls[event.index] = ToolCall(name=call.name, arguments=call.arguments + event.text, id=call.id)


def merged(events: Iterable[Event]) -> list[Event]:
    """Return the events with those in a row that add to the same text as one."""
    found: list[Event] = []
    for (kind, index), group in groupby(events, lambda event: (type(event), getattr(event, "index", 0))):
        if kind is Content:
            found.append(Content("".join(_texts(group))))
        elif kind is Reasoning:
            found.append(Reasoning("".join(_texts(group))))
        elif kind is CallArguments:
            found.append(CallArguments(index=index, text="".join(_texts(group))))
        else:
            found += group
    return found


def _texts(events: Iterable[Event]) -> Iterator[str]:
    return (event.text for event in events if not isinstance(event, CallBegins))


def parsed(text: str) -> Json:
    """Return the value of JSON. None if it has none: it is not JSON, or too deeply nested."""
    try:
        check_depth(text.encode(errors="replace"))
        found: Json = json.loads(text)
    except ValueError:
        return None
    return found
