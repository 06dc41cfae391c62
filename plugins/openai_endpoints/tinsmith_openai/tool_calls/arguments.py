"""Arguments that are written one by one as plain text: each becomes what the tool's schema says it is."""

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Final

from tinsmith_checkpoints.huggingface import Json
from tinsmith_openai.tool_calls.answers import Calls
from tinsmith_openai.tool_calls.events import Content, Event, parsed
from tinsmith_openai.tool_calls.python_literals import python_value
from tinsmith_openai.tool_calls.source import Parse, Source

_MOST_SCHEMAS: Final = 256
"""Within one argument's schema. It may refer to itself."""
_STRING: Final = frozenset({"string"})


class Arguments:
    """Writes the arguments of the last call as a JSON object, one after another.

    If the text ends too early, the object is not closed, so that nobody takes it for complete.
    """

    def __init__(self, calls: Calls, name: str) -> None:
        self._calls = calls
        self._schema = calls.tools.get(name, {})
        self._number = 0

    def value(self, key: str, value: Json) -> Iterator[Event]:
        yield self._calls.arguments(f"{self._before(key)}{_json(value)}")

    def text(self, key: str, text: str) -> Iterator[Event]:
        yield from self.value(key, converted(text, self._types(key)))

    def read(
        self, source: Source, key: str, ends: Sequence[str], *, breaks: bool = False, string: bool | None = None
    ) -> Parse[str | None]:
        """Read plain text up to one of the marks, which is returned. A string's text is passed on as it comes.

        `breaks`: one line break at its beginning and one at its end are not part of it. `string`: whether it is a
        string, if the model itself says so.
        """
        if string or (string is None and self._types(key) == _STRING):
            yield self._calls.arguments(f'{self._before(key)}"')
            mark = yield from _text(source, ends, lambda text: self._calls.arguments(_json(text)[1:-1]), breaks=breaks)
            if mark is not None:
                yield self._calls.arguments('"')
            return mark
        text = yield from source.until(*ends)
        if text is None:
            return None
        if breaks:
            text = text.removeprefix("\n").removesuffix("\n")
        yield from self.text(key, text) if string is None else self.value(key, json_or_text(text))
        return (yield from source.literal(*ends))

    def end(self) -> Iterator[Event]:
        yield self._calls.arguments("}" if self._number else "{}")

    def _before(self, key: str) -> str:
        self._number += 1
        return f"{'{' if self._number == 1 else ', '}{_json(key)}: "

    def _types(self, key: str) -> frozenset[str]:
        properties = self._schema.get("properties")
        return types_of(properties.get(key), self._schema) if isinstance(properties, dict) else frozenset()


def types_of(schema: Json, whole: Mapping[str, Json]) -> frozenset[str]:
    """Return the types that a schema allows; none if it does not say. `whole` has the definitions that it refers to."""
    found, waiting = set[str](), [schema]
    for _ in range(_MOST_SCHEMAS):
        if not waiting:
            return frozenset(found)
        one = waiting.pop()
        if isinstance(one, dict):
            named = one.get("type")
            found.update(name for name in (named if isinstance(named, list) else [named]) if isinstance(name, str))
            for several in ("anyOf", "oneOf", "allOf"):
                waiting += each if isinstance(each := one.get(several), list) else []
            if isinstance(reference := one.get("$ref"), str):
                waiting.append(_referred(reference, whole))
            values = one.get("enum", [one["const"]] if "const" in one else None)
            if "type" not in one and isinstance(values, list) and all(isinstance(value, str) for value in values):
                found.add("string")
    return frozenset()


def _referred(reference: str, whole: Mapping[str, Json]) -> Json:
    at: Json = dict(whole)
    for part in reference.removeprefix("#/").split("/"):
        at = at.get(part) if isinstance(at, dict) else None
    return at


def converted(text: str, types: frozenset[str]) -> Json:
    """Return the value of a text, as one of these types. A text that is none of them stays text."""
    if types == _STRING:
        return text
    if not types:
        return json_or_text(text)
    word = text.strip()
    found = parsed(word)
    if word.lower() == "null" and "null" in types:
        return None
    if word.lower() in {"true", "false"} and "boolean" in types:
        return word.lower() == "true"
    if _is_number(found) and types & {"integer", "number"}:
        whole = isinstance(found, float) and found.is_integer()
        if "number" in types or isinstance(found, int) or whole:
            return int(found) if whole and "number" not in types else found
    if found is None and types & {"object", "array"}:
        found = python_value(word)
    if (isinstance(found, dict) and "object" in types) or (isinstance(found, list) and "array" in types):
        return found
    return text


def _is_number(value: Json) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def json_or_text(text: str) -> Json:
    found = parsed(text)
    if found is None and text.strip() != "null":
        return text
    return text if isinstance(found, float) and not math.isfinite(found) else found


def _text(source: Source, ends: Sequence[str], emit: Callable[[str], Event], *, breaks: bool) -> Parse[str | None]:
    if not breaks:
        return (yield from source.text_until(ends, emit))
    yield from source.literal("\n")
    kept, parts = "", source.text_until(ends, Content)
    while True:
        try:
            event = next(parts)
        except StopIteration as stop:
            mark: str | None = stop.value
            if mark is None and kept:
                yield emit(kept)
            return mark
        if isinstance(event, Content):
            text = kept + event.text
            kept = "\n" if text.endswith("\n") else ""
            if said := text.removesuffix("\n"):
                yield emit(said)
        else:
            yield event


def _json(value: Json) -> str:
    return json.dumps(value)
