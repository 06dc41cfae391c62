"""Calls as JSON objects with a name and arguments: Hermes, Qwen, Llama, Mistral, Granite, Phi, Nemotron, Command R."""

import json
from typing import Final

from tinsmith_checkpoints.huggingface import Json
from tinsmith_openai.tool_calls.answers import Calls, Grammar
from tinsmith_openai.tool_calls.events import parsed
from tinsmith_openai.tool_calls.source import Parse, Source

_NAMES: Final = ("name", "tool_name")
_ARGUMENTS: Final = ("arguments", "parameters")


def between(*closes: str, begins: str = "", known: bool = False, also: Grammar | None = None) -> Grammar:
    """Return a grammar for one call, several in a row, or a list of them, perhaps before an end mark.

    `begins`: what else must stand before them. `known`: only of tools that were offered. `also`: another form in the
    same place.
    """

    def grammar(source: Source, calls: Calls) -> Parse[bool]:
        place = source.at
        yield from source.space()
        if begins and (yield from source.literal(begins)) is None:
            return False
        if not (yield from json_calls(source, calls, known=known)):
            source.at = place
            if also is None or not (yield from also(source, calls)):
                return False
        yield from close(source, *closes)
        return True

    return grammar


def close(source: Source, *marks: str) -> Parse[None]:
    """Read an end mark if there is one, with the blanks before it."""
    place = source.at
    yield from source.space()
    if not marks or (yield from source.literal(*marks)) is None:
        source.at = place


def json_calls(source: Source, calls: Calls, *, known: bool = False) -> Parse[bool]:
    yield from source.space()
    listed = (yield from source.literal("[")) is not None
    found = False
    while True:
        place = source.at
        yield from source.space()
        if (yield from source.ahead("{")) is None or not (yield from json_call(source, calls, known=known)):
            source.at = place
            break
        found = True
        place = source.at
        yield from source.space()
        if (yield from source.literal(",", ";")) is None:
            source.at = place
    if found and listed:
        yield from close(source, "]")
    return found


def json_call(source: Source, calls: Calls, *, known: bool = False) -> Parse[bool]:
    """Read one object. The arguments come piece by piece if the name is written before them."""
    place = source.at
    name = yield from _name_before_arguments(source)
    if name is not None and (not known or name in calls.tools):
        yield calls.begin(name)
        yield from source.json(calls.arguments)
        yield from _rest_of_object(source)
        return True
    source.at = place
    text = yield from source.json()
    found = parsed(text or "")
    name = next((found[key] for key in _NAMES if key in found), None) if isinstance(found, dict) else None
    if not isinstance(found, dict) or not isinstance(name, str) or (known and name not in calls.tools):
        return False
    arguments: Json = next((found[key] for key in _ARGUMENTS if found.get(key) is not None), {})
    yield calls.begin(name)
    yield calls.arguments(arguments if isinstance(arguments, str) else json.dumps(arguments))
    return True


def _name_before_arguments(source: Source) -> Parse[str | None]:
    """Read up to the object of the arguments. Return the name; None if the object is written in another way."""
    name: str | None = None
    yield from source.literal("{")
    while True:
        key = yield from _string(source)
        if key is None or (yield from source.literal(":")) is None:
            return None
        yield from source.space()
        if key in _ARGUMENTS:
            return name if (yield from source.ahead("{")) is not None else None
        value = parsed((yield from source.json()) or "")
        if key in _NAMES and isinstance(value, str):
            name = value
        yield from source.space()
        if (yield from source.literal(",")) is None:
            return None


def _string(source: Source) -> Parse[str | None]:
    yield from source.space()
    if (yield from source.ahead('"')) is None:
        return None
    found = parsed((yield from source.json()) or "")
    yield from source.space()
    return found if isinstance(found, str) else None


def _rest_of_object(source: Source) -> Parse[None]:
    """Read the end of the object, and what comes after the arguments. A model may forget the bracket."""
    place = source.at
    while True:
        yield from source.space()
        if (yield from source.literal("}")) is not None:
            return
        if (yield from source.literal(",")) is None or (yield from _string(source)) is None:
            break
        if (yield from source.literal(":")) is None:
            break
        yield from source.space()
        yield from source.json()
    source.at = place
