"""The calls of FunctionGemma and Gemma 4: `call:NAME{KEY:VALUE,...}`, with marks as the quotes of strings."""

from typing import Final

from tinsmith_checkpoints.huggingface import Json
from tinsmith_openai.tool_calls.answers import Calls, Grammar
from tinsmith_openai.tool_calls.arguments import Arguments
from tinsmith_openai.tool_calls.events import parsed
from tinsmith_openai.tool_calls.json_calls import close
from tinsmith_openai.tool_calls.source import Parse, Source

_MOST_NESTED: Final = 32
_WORDS: Final[dict[str, Json]] = {"None": None, "True": True, "False": False}


class _BrokenError(Exception):
    """The text ends, or is no value."""


def calls_with(quote: str, close_mark: str) -> Grammar:
    def grammar(source: Source, calls: Calls) -> Parse[bool]:
        yield from source.space()
        if (yield from source.literal("call:")) is None:
            return False
        name = yield from source.while_true(_in_name)
        if not name or (yield from source.literal("{")) is None:
            return False
        yield calls.begin(name)
        try:
            yield from _arguments(source, Arguments(calls, name), quote)
        except _BrokenError:
            return True
        yield from close(source, close_mark)
        return True

    return grammar


def _arguments(source: Source, arguments: Arguments, quote: str) -> Parse[None]:
    while (yield from source.literal("}")) is None:
        key = yield from _key(source, quote)
        if (yield from source.literal(quote)) is None:
            yield from arguments.value(key, (yield from _value(source, quote, 1)))
        elif (yield from arguments.read(source, key, [quote], string=True)) is None:
            raise _BrokenError
        yield from _separated(source, "}")
    yield from arguments.end()


def _key(source: Source, quote: str) -> Parse[str]:
    quoted = (yield from source.literal(quote)) is not None
    end = quote if quoted else ":"
    key = yield from source.until(end)
    if key is None:
        raise _BrokenError
    yield from source.literal(end)
    if quoted and (yield from source.literal(":")) is None:
        raise _BrokenError
    return key


def _separated(source: Source, end: str) -> Parse[None]:
    if (yield from source.literal(",")) is None and (yield from source.ahead(end)) is None:
        raise _BrokenError


def _value(source: Source, quote: str, depth: int) -> Parse[Json]:
    if depth > _MOST_NESTED:
        raise _BrokenError
    begin = yield from source.literal(quote, "{", "[")
    if begin == quote:
        text = yield from source.until(quote)
        if text is None:
            raise _BrokenError
        yield from source.literal(quote)
        return text
    if begin == "{":
        named: dict[str, Json] = {}
        while (yield from source.literal("}")) is None:
            key = yield from _key(source, quote)
            named[key] = yield from _value(source, quote, depth + 1)
            yield from _separated(source, "}")
        return named
    if begin == "[":
        listed: list[Json] = []
        while (yield from source.literal("]")) is None:
            listed.append((yield from _value(source, quote, depth + 1)))
            yield from _separated(source, "]")
        return listed
    word = (yield from source.while_true(lambda each: each not in ",}]")).strip()
    if (yield from source.ahead(",", "}", "]")) is None:
        raise _BrokenError
    found = parsed(word)
    return _WORDS.get(word, word) if found is None and word != "null" else found


def _in_name(character: str) -> bool:
    return character.isalnum() or character in "_-."
