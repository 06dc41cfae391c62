"""The text of an answer as it comes, and the steps by which grammars read it.

A grammar is a generator: it yields the events that are certain, and None when it needs more text. Each step decides
only when no further text could change the decision, so the events do not depend on how the text was cut.
"""

from collections.abc import Callable, Generator, Iterable
from typing import Final, TypeVar

from tinsmith_openai.tool_calls.events import Event

T = TypeVar("T")

Parse = Generator[Event | None, None, T]

_SCALAR_ENDS: Final = frozenset(",]} \t\r\n")


class Source:
    """`at` may be set back to an earlier value, unless an event was yielded in between."""

    def __init__(self) -> None:
        self.at = 0
        self.mark_begins_line = True
        """Whether only blanks stood before the last mark that `text_until` has found, on its line."""
        self._text = ""
        self._ended = False
        self._blank = True  # the line so far, up to the text that is left

    def add(self, text: str) -> None:
        self._text += text

    def end(self) -> None:
        self._ended = True

    def text_until(self, marks: Iterable[str], emit: Callable[[str], Event]) -> Parse[str | None]:
        """Yield text until one of the marks, which is read as well and returned. None at the end of the text."""
        wanted = sorted(marks, key=len, reverse=True)
        while True:
            self._drop()
            place = min((at for mark in wanted if (at := self._text.find(mark)) >= 0), default=len(self._text))
            undecided = len(self._text) - (0 if self._ended else self._beginning(wanted))
            if said := self._text[: min(place, undecided)]:
                self.at = len(said)
                yield emit(said)
            if place < undecided:
                self.mark_begins_line = self._is_blank(place)
                mark = next(mark for mark in wanted if self._text.startswith(mark, place))
                self.at = place + len(mark)
                return mark
            if self._ended:
                return None
            yield from self._more()

    def _drop(self) -> None:
        self._blank = self._is_blank(self.at)
        self._text, self.at = self._text[self.at :], 0

    def _is_blank(self, until: int) -> bool:
        _, newline, line = self._text[:until].rpartition("\n")
        return not line.strip() and (self._blank or bool(newline))

    def _beginning(self, wanted: list[str]) -> int:
        """Return the length of the longest end of the text that a mark may begin with, and go on."""
        lengths = range(min(len(self._text), len(wanted[0]) - 1 if wanted else 0), 0, -1)
        return next(
            (n for n in lengths if any(mark.startswith(self._text[-n:]) and len(mark) > n for mark in wanted)), 0
        )

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
                return None
            yield from self._more()

    def _more(self) -> Parse[None]:
        """Wait for text, or for its end."""
        known = len(self._text)
        while len(self._text) == known and not self._ended:
            yield None
