"""Calls as Python writes them: Llama 4 and 3.2, OLMo 3."""

from collections.abc import Callable

from tinsmith_openai.tool_calls.answers import Calls, Grammar
from tinsmith_openai.tool_calls.arguments import Arguments
from tinsmith_openai.tool_calls.json_calls import close, json_calls
from tinsmith_openai.tool_calls.python_literals import python_value
from tinsmith_openai.tool_calls.source import Parse, Source


def bare(source: Source, calls: Calls) -> Parse[bool]:
    """Read what nothing announces, so that only tools that were offered count: JSON, or a list of Python's calls."""
    yield from source.space()
    yield from source.literal("<|python_tag|>", "<|python_start|>")
    place = source.at
    if (yield from json_calls(source, calls, known=True)):
        yield from close(source, "<|python_end|>")
        return True
    source.at = place
    return (yield from python_list("<|python_end|>", known=True)(source, calls))


def python_list(close_mark: str, *, known: bool = False) -> Grammar:
    def grammar(source: Source, calls: Calls) -> Parse[bool]:
        yield from source.space()
        listed = (yield from source.literal("[")) is not None
        found = False
        while True:
            place = source.at
            yield from source.space()
            if not (yield from _python_call(source, calls, known=known)):
                source.at = place
                break
            found = True
            place = source.at
            yield from source.space()
            if (yield from source.literal(",")) is None:
                source.at = place
        if found and listed:
            yield from close(source, "]")
        if found:
            yield from close(source, close_mark)
        return found

    return grammar


def _python_call(source: Source, calls: Calls, *, known: bool) -> Parse[bool]:
    """`NAME(KEY=VALUE, ...)`. Arguments without keys get those of the schema, in its order."""
    name = (yield from source.while_true(_in_name)).removesuffix(".call")
    if not name or (known and name not in calls.tools) or (yield from source.literal("(")) is None:
        return False
    yield calls.begin(name)
    arguments = Arguments(calls, name)
    properties = calls.tools.get(name, {}).get("properties")
    keys = iter(properties if isinstance(properties, dict) else ())
    while True:
        yield from source.space()
        if (yield from source.literal(")")) is not None:
            yield from arguments.end()
            return True
        place = source.at
        key = yield from source.while_true(_in_name)
        yield from source.space()
        if not key or (yield from source.literal("=")) is None:
            source.at, key = place, next(keys, "")
        text = yield from source.while_true(_in_value())
        if not text.strip() or (yield from source.ahead(",", ")")) is None:
            return True
        yield from _written(arguments, key, text.strip())
        yield from source.literal(",")


def _written(arguments: Arguments, key: str, text: str) -> Parse[None]:
    value = python_value(text)
    yield from arguments.value(key, text if value is None and text not in {"None", "null"} else value)


def _in_name(character: str) -> bool:
    return character.isalnum() or character in "_-."


def _in_value() -> Callable[[str], bool]:
    """Return a function that says for one character after another whether it belongs to a value."""
    depth, quote, escaped = 0, "", False

    def belongs(each: str) -> bool:
        nonlocal depth, quote, escaped
        if quote:
            if escaped:
                escaped = False
            elif each == "\\":
                escaped = True
            elif each == quote:
                quote = ""
            return True
        if depth == 0 and each in ",)":
            return False
        if each in "\"'":
            quote = each
        depth += (each in "([{") - (each in ")]}")
        return True

    return belongs
