"""The bounds of a request's fields, listed in `docs/reference/limits.md`, and their checks.

No check costs more than reading what it checks, and each stops at the first error. The checks of fields raise
ValueError, as pydantic wants it.
"""

import json
import re
from typing import Any, Final

import numpy as np
import orjson

from tinsmith.errors import UserError
from tinsmith_checkpoints.values import Json

MAX_NAME_CHARS: Final = 1024
"""Of ids, names, paths, tags and the like."""
MAX_TAGS: Final = 100
MAX_FOUND: Final = 200
"""Of one page of a search."""
MAX_OWNERS: Final = 10
"""Named in one search."""
MAX_METADATA_BYTES: Final = 32 << 10
"""Of `user_metadata`: its characters, and 8 for each value."""
MAX_METADATA_DEPTH: Final = 32
MAX_RECIPIENTS: Final = 100
MAX_CHUNKS: Final = 4096
"""Of a prompt, or of one datum."""
MAX_STOP_STRINGS: Final = 256
MAX_STOP_CHARS: Final = 16 << 10
"""Of all stop strings together."""
MAX_STOP_TOKENS: Final = 8192
MAX_NUMBERS: Final = 4 << 20
"""In a JSON body: tokens, and the values and indices of tensors."""
MAX_CONTAINERS: Final = 1 << 16
"""Lists and objects in a JSON body."""
MAX_LEVELS: Final = 64
"""Of lists and objects in each other in a JSON body. Whatever reads them may then recurse."""
MAX_STRINGS: Final = 1 << 17
"""Strings in a JSON body, names of fields included."""
MAX_DIMENSIONS: Final = 8
MAX_COMPARED_BYTES: Final = 1 << 20
"""Of a body that is searched for names that come twice: reading it again holds up all others."""

_CONTROL: Final = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069]")
_CONTROL_BUT_LINES: Final = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069]")
_WITH_COLONS: Final = (str, dict, list)
_CONTAINERS: Final = frozenset({dict, list})
_STEP: Final = 1 << 20
_VALUE_BYTES: Final = 8


def plain(text: str) -> str:
    """Refuse control characters, line separators and changes of direction: names are shown, logged and stored."""
    return _without(_CONTROL, text)


def lines(text: str) -> str:
    """As `plain`, but line breaks and tabs may pass."""
    return _without(_CONTROL_BUT_LINES, text)


def _without(refused: re.Pattern[str], text: str) -> str:
    found = refused.search(text)
    if found is not None:
        msg = f"must not hold control characters, this one holds {found[0]!r} at {found.start()}; remove it"
        raise ValueError(msg)
    return text


def shortened(text: str) -> str:
    """For a text that only people read: cut it and replace control characters, rather than refuse it."""
    return _CONTROL_BUT_LINES.sub("\N{REPLACEMENT CHARACTER}", text[: 8 * MAX_NAME_CHARS])


# Metadata -------------------------------------------------------------------------------------------------------------


def metadata(value: object) -> object:
    """Check `user_metadata` before its values: its size, its depth and its characters."""
    if isinstance(value, dict):
        _measured(value, 0, MAX_METADATA_DEPTH)
    return value


def _measured(value: object, size: int, levels: int) -> int:
    """Return the size plus the value's size. Stops as soon as it is too large."""
    if levels == 0:
        msg = f"is nested deeper than {MAX_METADATA_DEPTH} levels; flatten it"
        raise ValueError(msg)
    size += _VALUE_BYTES + (len(value) if isinstance(value, str) else 0)
    if size > MAX_METADATA_BYTES:
        msg = f"is larger than {MAX_METADATA_BYTES} bytes; keep large values elsewhere"
        raise ValueError(msg)
    match value:
        case str():
            lines(value)
        case list():
            for each in value:
                size = _measured(each, size, levels - 1)
        case dict():
            for key, each in value.items():
                size = _measured(each, size + len(plain(key)), levels - 1)
    return size


# Numbers --------------------------------------------------------------------------------------------------------------


def integers(value: object) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Take a JSON list of integers as an array."""
    return _array(value, {int}, "integers", np.dtype(np.int64))


def numbers(value: object) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Take a JSON list of numbers as an array."""
    return _array(value, {int, float}, "numbers", np.dtype(np.float64))


def _array(value: object, types: set[type], what: str, dtype: np.dtype[Any]) -> np.ndarray[Any, Any]:
    if isinstance(value, np.ndarray) and value.dtype == dtype:
        return value
    if not isinstance(value, list):
        msg = f"must be a list of {what}"
        raise ValueError(msg)  # noqa: TRY004 - a TypeError would not become a validation error
    if not set(map(type, value)) <= types:
        at = next(index for index, each in enumerate(value) if type(each) not in types)
        msg = f"must be a list of {what}; [{at}] is of type {type(value[at]).__name__}"
        raise ValueError(msg)
    try:
        return np.array(value, dtype)
    except OverflowError as error:
        msg = "holds an integer that is out of range; allowed: 64 bits"
        raise ValueError(msg) from error


def stop(value: object) -> object:
    """Check `stop` before its form: how much of it there is."""
    listed = value if isinstance(value, list) else [value]
    texts = [each for each in listed if isinstance(each, str)]
    for count, allowed, what in (
        (len(texts), MAX_STOP_STRINGS, "strings"),
        (sum(map(len, texts)), MAX_STOP_CHARS, "characters"),
        (len(listed), MAX_STOP_TOKENS, "tokens"),
    ):
        if count > allowed:
            msg = f"holds {count} {what}; allowed: {allowed}"
            raise ValueError(msg)
    return value


# Whole bodies ---------------------------------------------------------------------------------------------------------


def json_content(body: bytes) -> Json:
    """Decode a JSON body, unless what it holds would take many times its own size in memory.

    Raises orjson.JSONDecodeError, or UserError for what would, or is nested too deeply.
    """
    count = 0
    for marks, allowed, what in (
        (b",", MAX_NUMBERS, "values"),
        (b'"', 2 * MAX_STRINGS, "quotation marks"),
        (b"[{", MAX_CONTAINERS, "lists and objects"),
    ):
        count = 0
        for at in range(0, len(body), _STEP):  # in steps, so that other threads run in between
            count += sum(body.count(mark, at, at + _STEP) for mark in marks)
            if count > allowed:
                msg = f"the body holds more than {allowed} {what}; send shorter lists"
                raise UserError(msg)
    try:
        content = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        if "depth" in error.msg:
            raise _too_deep() from error
        raise
    if count > MAX_LEVELS:
        _refuse_deep(content)
    return content


def _refuse_deep(content: Json) -> None:
    """Raise UserError if there are too many levels. Level by level: whatever recurses would not return."""
    level = [content] if type(content) in _CONTAINERS else []
    for _ in range(MAX_LEVELS):
        if not (level := [inner for each in level for inner in _containers_in(each)]):
            return
    raise _too_deep()


def _containers_in(value: Json) -> list[Json]:
    values = value.values() if isinstance(value, dict) else value
    if _CONTAINERS.isdisjoint(map(type, values)):  # lists of numbers are long
        return []
    return [each for each in values if type(each) in _CONTAINERS]


def _too_deep() -> UserError:
    return UserError(f"the body is nested too deeply, in more than {MAX_LEVELS} levels; flatten it")


def refuse_repeated_names(body: bytes, content: dict[str, Json]) -> None:
    """Raise UserError if an object in a body of up to MAX_COMPARED_BYTES has one name twice: the last would count.

    `content`: the parsed body. If nothing is gone, it accounts for all colons of the body, so hardly any body is
    read a second time.
    """
    if len(body) > MAX_COMPARED_BYTES:
        return
    if body.count(b":") > _num_colons(content):
        json.loads(body, object_pairs_hook=_with_each_once, parse_int=str, parse_float=str)


def _num_colons(value: str | dict[str, Json] | list[Json]) -> int:
    """Count them behind names and in texts."""
    if isinstance(value, str):
        return value.count(":")
    if isinstance(value, dict):
        inner: list[Any] = [each for each in value.values() if isinstance(each, _WITH_COLONS)]
        return len(value) + "".join(value).count(":") + sum(map(_num_colons, inner))
    if value and isinstance(value[0], _WITH_COLONS):  # lists of numbers are long
        return sum(_num_colons(each) for each in value if isinstance(each, _WITH_COLONS))
    return 0


def _with_each_once(pairs: list[tuple[str, object]]) -> dict[str, object]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        name = next(each for each in names if names.count(each) > 1)
        msg = f"{name[:100]!r} is given more than once in an object, and the last would count; send one"
        raise UserError(msg)
    return found
