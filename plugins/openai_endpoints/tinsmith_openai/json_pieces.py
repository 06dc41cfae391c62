"""JSON of large values, made in pieces: encoding one in one piece holds Python's lock for as long as it takes."""

import json
from collections.abc import Iterator
from typing import Any, Final

from tinsmith_openai.text_work import Asker

_OUTER: Final = 4
"""Levels above the rows of logprobs: the answer, its choices, a choice, its logprobs."""
_ROWS: Final = 256


def as_json(value: Any, asker: Asker) -> str:  # Any: an answer made here
    return "".join(_pieces(value, asker, 0))


def _pieces(value: Any, asker: Asker, level: int) -> Iterator[str]:
    if level < _OUTER and isinstance(value, dict):
        yield "{"
        for number, (name, each) in enumerate(value.items()):
            yield f"{',' if number else ''}{_at_once(name)}:"
            yield from _pieces(each, asker, level + 1)
        yield "}"
    elif level < _OUTER and isinstance(value, list):
        yield "["
        for number, each in enumerate(value):
            yield "," if number else ""
            yield from _pieces(each, asker, level + 1)
        yield "]"
    elif isinstance(value, list):
        yield "["
        for start in range(0, len(value), _ROWS):
            asker.check()
            yield f"{',' if start else ''}{_at_once(value[start : start + _ROWS])[1:-1]}"
        yield "]"
    else:
        yield _at_once(value)


def _at_once(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
