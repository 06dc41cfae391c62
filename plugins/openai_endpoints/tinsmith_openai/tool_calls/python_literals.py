"""Values as Python writes them. `ast.literal_eval` would warn on the console of what a model writes."""

import re
from collections.abc import Iterator
from typing import Final

from tinsmith_checkpoints.huggingface import Json
from tinsmith_openai.tool_calls.events import parsed

_MOST_NESTED: Final = 32
_TOKEN: Final = re.compile(
    r"""\s*(?:(?P<text>'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*")|(?P<word>[\w.+-]+)|(?P<sign>[\[\](){},:]))""", re.DOTALL
)
_ESCAPE: Final = re.compile(r"\\(?:x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|(.))", re.DOTALL)
_ESCAPED: Final = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "\n": ""} | {each: each for each in "\\'\""}
_WORDS: Final[dict[str, Json]] = {
    "True": True,
    "False": False,
    "None": None,
    "true": True,
    "false": False,
    "null": None,
}
_CLOSES: Final = {"[": "]", "(": ")", "{": "}"}


class _NoLiteralError(ValueError):
    pass


def python_value(text: str) -> Json:
    """Return the value of a literal of Python or JSON. None if it is neither, or JSON has no such value."""
    tokens = _tokens(text)
    try:
        found = _value(next(tokens), tokens, 0)
        if next(tokens, None) is not None:
            return None
    except (_NoLiteralError, StopIteration):
        return None
    return found


def _tokens(text: str) -> Iterator[re.Match[str]]:
    at, text = 0, text.rstrip()
    while at < len(text):
        if (found := _TOKEN.match(text, at)) is None:
            raise _NoLiteralError
        yield found
        at = found.end()


def _value(token: re.Match[str], tokens: Iterator[re.Match[str]], depth: int) -> Json:
    if token["text"] is not None:
        return _ESCAPE.sub(_unescaped, token["text"][1:-1])
    word = token["word"]
    if word is not None:
        if word in _WORDS:
            return _WORDS[word]
        number = parsed(word.removeprefix("+"))
        if not isinstance(number, int | float) or number in {float("inf"), -float("inf")}:
            raise _NoLiteralError
        return number
    if token["sign"] not in _CLOSES or depth == _MOST_NESTED:
        raise _NoLiteralError
    return _several(_CLOSES[token["sign"]], tokens, depth + 1)


def _several(close: str, tokens: Iterator[re.Match[str]], depth: int) -> Json:
    """Return the values up to a bracket: a list, or an object if the bracket is a brace."""
    listed: list[Json] = []
    named: dict[str, Json] = {}
    while (token := _next(tokens))["sign"] != close:
        value = _value(token, tokens, depth)
        if close == "}":
            if not isinstance(value, str) or _next(tokens)["sign"] != ":":
                raise _NoLiteralError
            named[value] = _value(_next(tokens), tokens, depth)
        else:
            listed.append(value)
        if (sign := _next(tokens)["sign"]) == close:
            break
        if sign != ",":
            raise _NoLiteralError
    return named if close == "}" else listed


def _next(tokens: Iterator[re.Match[str]]) -> re.Match[str]:
    token = next(tokens, None)
    if token is None:
        raise _NoLiteralError
    return token


def _unescaped(escape: re.Match[str]) -> str:
    code = escape[1] or escape[2] or escape[3]
    if code is not None:
        return chr(min(int(code, 16), 0x10FFFF))
    return _ESCAPED.get(escape[4], escape[0])
