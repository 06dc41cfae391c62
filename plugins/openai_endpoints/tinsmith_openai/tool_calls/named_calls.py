"""Calls as a name and a JSON object, between marks of the family: Kimi-K2, and Mistral's newer form."""

from tinsmith_openai.tool_calls.answers import Calls
from tinsmith_openai.tool_calls.json_calls import close, json_calls
from tinsmith_openai.tool_calls.source import Parse, Source


def kimi(source: Source, calls: Calls) -> Parse[bool]:
    """The model itself numbers its calls: `functions.NAME:NUMBER` is the id as well."""
    found = False
    while True:
        place = source.at
        yield from source.space()
        if (yield from source.literal("<|tool_call_begin|>")) is None or not (yield from _kimi_call(source, calls)):
            source.at = place
            break
        found = True
    if found:
        yield from close(source, "<|tool_calls_section_end|>")
    return found


def _kimi_call(source: Source, calls: Calls) -> Parse[bool]:
    identifier = yield from source.until("<|tool_call_argument_begin|>")
    if identifier is None:
        return False
    yield from source.literal("<|tool_call_argument_begin|>")
    identifier = identifier.strip()
    name = identifier.partition(":")[0].removeprefix("functions.")
    if not (yield from named_call(source, calls, name, identifier)):
        return False
    yield from close(source, "<|tool_call_end|>")
    return True


def mistral(source: Source, calls: Calls) -> Parse[bool]:
    """`[{"name": ..., "arguments": ...}]`, or `NAME[CALL_ID]ID[ARGS]{...}`. One mark for each."""
    place = source.at
    if (yield from json_calls(source, calls)):
        return True
    source.at = place
    yield from source.space()
    name = yield from source.while_true(lambda each: each.isalnum() or each in "_-.")
    identifier: str | None = None
    if (yield from source.literal("[CALL_ID]")) is not None:
        identifier = yield from source.while_true(str.isalnum)
    yield from source.literal("[ARGS]")
    return bool(name) and (yield from named_call(source, calls, name, identifier))


def named_call(source: Source, calls: Calls, name: str, identifier: str | None = None) -> Parse[bool]:
    """Read the object of the arguments."""
    yield from source.space()
    if not name or (yield from source.ahead("{")) is None:
        return False
    yield calls.begin(name, identifier)
    yield from source.json(calls.arguments)
    return True
