"""Finds stop strings in a text that grows, at a cost for each character that does not depend on their lengths."""

from collections.abc import Sequence


class StopStrings:
    """Remembers how far the text's end matches each string (Knuth, Morris, Pratt)."""

    def __init__(self, strings: Sequence[str]) -> None:
        self._matches = [_Match(string) for string in strings]

    def read(self, text: str) -> int | None:
        """Read more text. Return where the first string begins that it completes; None if it completes none.

        0 is the start of this text; a string that began in earlier text has a negative place.
        """
        ends = [match.string_at(text) for match in self._matches]
        return min((at for at in ends if at is not None), default=None)

    @property
    def num_begun(self) -> int:
        """The length of the text's longest end with which a string begins."""
        return max((match.length for match in self._matches), default=0)


class _Match:
    def __init__(self, string: str) -> None:
        self._string = string
        self._shorter = [0, 0]  # of a match's length: the next shorter match that ends there; made as far as needed
        self.length = 0

    def string_at(self, text: str) -> int | None:
        for at, character in enumerate(text):
            length = self.length
            while length and self._string[length] != character:
                length = self._shorter[length]
            self.length = length + (self._string[length] == character)
            if self.length == len(self._string):
                return at + 1 - self.length
            self._know(self.length)
        return None

    def _know(self, length: int) -> None:
        """Have what is needed at a match of that length."""
        while len(self._shorter) <= length:
            last = self._string[len(self._shorter) - 1]
            shorter = self._shorter[-1]
            while shorter and self._string[shorter] != last:
                shorter = self._shorter[shorter]
            self._shorter.append(shorter + (self._string[shorter] == last))
