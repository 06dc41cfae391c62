"""The text of an answer as it comes, and the steps by which grammars read it.

A grammar is a generator: it yields the events that are certain, and None when it needs more text. Each step decides
only when no further text could change the decision, so the events do not depend on how the text was cut.
"""

import re
from collections.abc import Callable, Generator, Iterable
from functools import lru_cache
from typing import Final, TypeVar

from tinsmith_openai.tool_calls.events import Event

T = TypeVar("T")

Parse = Generator[Event | None, None, T]

_MOST_KEPT: Final = 1 << 14
_MOST_INDENTED: Final = 64
_SCALAR_ENDS: Final = frozenset(",]} \t\r\n")


@lru_cache(maxsize=256)
def _any_of(marks: tuple[str, ...]) -> re.Pattern[str]:
    """Return a pattern for the longest of these marks."""
    return re.compile("|".join(map(re.escape, sorted(marks, key=len, reverse=True))))


class Source:
    """`at` may be set back to an earlier value, unless an event was yielded in between."""

    def __init__(self) -> None:
        self.at = 0
        self.looked = 0
        """How far `until` and `json` have looked, perhaps in vain."""
        self._text = ""
        self._ended = False
        self._mark_at = 0
        self._is_whole = True  # nothing was dropped

    def add(self, text: str) -> None:
        self._text += text

    def end(self) -> None:
        self._ended = True

    def text_until(self, marks: Iterable[str], emit: Callable[[str], Event]) -> Parse[str | None]:
        """Yield text until one of the marks, which is read as well and returned. None at the end of the text."""
        wanted = tuple(marks)
        pattern = _any_of(wanted)
        while True:
            self._drop()
            found = pattern.search(self._text, self.at) if wanted else None
            place = len(self._text) if found is None else found.start()
            undecided = len(self._text) - (0 if self._ended else self._beginning(wanted))
            if said := self._text[self.at : min(place, undecided)]:
                self.at += len(said)
                yield emit(said)
            if found is not None and place < undecided:
                self._mark_at, self.at = place, found.end()
                return found[0]
            if self._ended:
                return None
            yield from self._more()

    @property
    def mark_begins_line(self) -> bool:
        """Whether only a few blanks stand before the last mark that `text_until` has found, on its line."""
        before = self._text[max(0, self._mark_at - _MOST_INDENTED) : self._mark_at].rstrip(" \t\r")
        return before.endswith("\n") or (not before and self._is_whole and self._mark_at < _MOST_INDENTED)

    def _drop(self) -> None:
        """Forget what was read long ago."""
        if self.at > _MOST_KEPT and self.at > len(self._text) // 2:
            begin = self.at - _MOST_INDENTED
            self._text, self.at, self._is_whole = self._text[begin:], _MOST_INDENTED, False

    def _beginning(self, wanted: tuple[str, ...]) -> int:
        """Return the length of the longest end of the text that a mark may begin with, and go on."""
        longest = max(map(len, wanted), default=1) - 1
        lengths = range(min(len(self._text) - self.at, longest), 0, -1)
        ends = (self._text[len(self._text) - n :] for n in lengths)
        return next((len(end) for end in ends if any(each.startswith(end) and each != end for each in wanted)), 0)

    def ahead(self, *wanted: str) -> Parse[str | None]:
        """Return the longest of these with which the text goes on. None if there is none."""
        longest = sorted(wanted, key=len, reverse=True)
        while True:
            more = False
            for each in longest:
                text = self._text[self.at : self.at + len(each)]
                if text == each:
                    return each
                if not self._ended and each.startswith(text):
                    more = True
                    break
            if not more:
                return None
            yield from self._more()

    def literal(self, *wanted: str) -> Parse[str | None]:
        """Read the longest of these with which the text goes on."""
        found = yield from self.ahead(*wanted)
        self.at += len(found or "")
        return found

    def space(self) -> Parse[None]:
        yield from self.while_true(str.isspace)

    def while_true(self, belongs: Callable[[str], bool]) -> Parse[str]:
        """Read characters as long as they belong."""
        start = self.at
        while True:
            while self.at < len(self._text) and belongs(self._text[self.at]):
                self.at += 1
            if self.at < len(self._text) or self._ended:
                return self._text[start : self.at]
            yield from self._more()

    def until(self, *marks: str) -> Parse[str | None]:
        """Read up to the first of the marks, and not the mark. None if there is none: nothing is read."""
        looked = self.at
        while True:
            found = [place for mark in marks if (place := self._text.find(mark, looked)) >= 0]
            if found:
                start, self.at = self.at, min(found)
                return self._text[start : self.at]
            if self._ended:
                self.looked = len(self._text)
                return None
            looked = max(self.at, len(self._text) - max(map(len, marks)) + 1)
            yield from self._more()

    def json(self, emit: Callable[[str], Event] | None = None) -> Parse[str | None]:
        """Read one JSON value, and yield it as it comes if there is an event for it.

        Objects and lists end with their bracket, whatever is between. None if the text ends before, or is no value.
        """
        first = yield from self.ahead("{", "[", '"')
        if first is None:
            return (yield from self.while_true(lambda each: each not in _SCALAR_ENDS)) or None
        start = told = self.at
        depth, quoted, escaped = 0, False, False
        while True:
            while self.at < len(self._text):
                each = self._text[self.at]
                self.at += 1
                if quoted:
                    escaped, quoted = each == "\\" and not escaped, escaped or each != '"'
                else:
                    quoted = each == '"'
                    depth += (each in "{[") - (each in "}]")
                if depth == 0 and not quoted:
                    break
            else:
                each = ""
            if emit is not None and self.at > told:
                yield emit(self._text[told : self.at])
                told = self.at
            if each:
                return self._text[start : self.at]
            if self._ended:
                self.looked = len(self._text)
                return None
            yield from self._more()

    def _more(self) -> Parse[None]:
        """Wait for text, or for its end."""
        known = len(self._text)
        while len(self._text) == known and not self._ended:
            yield None
