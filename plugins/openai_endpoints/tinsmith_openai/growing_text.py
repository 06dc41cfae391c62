"""The text of a sequence while its tokens come."""

from collections.abc import Iterable, Sequence

from tinsmith_openai.texts import ModelText


class GrowingText:
    """Yields text that later tokens cannot change.

    It keeps back an unfinished character, and a possible beginning of a stop string.
    """

    def __init__(self, text: ModelText, stop_strings: Sequence[str]) -> None:
        self._step = text.stepwise()
        self._stops = stop_strings
        self._kept = ""
        self._ended = False

    def add(self, tokens: Iterable[int]) -> str:
        """Return the text that is certain now, without what was returned before."""
        for token in tokens:
            if self._ended:  # a stop string was found: what follows is not part of the text
                break
            self._kept += self._step(token) or ""
            ends = [at for stop in self._stops if (at := self._kept.find(stop)) >= 0]
            if ends:
                self._kept, self._ended = self._kept[: min(ends)], True
        certain = len(self._kept) if self._ended else len(self._kept) - self._length_of_beginning()
        said, self._kept = self._kept[:certain], self._kept[certain:]
        return said

    def _length_of_beginning(self) -> int:
        """Return the length of the longest end of the text with which a stop string begins."""
        longest = min(len(self._kept), max(map(len, self._stops), default=1) - 1)
        lengths = range(longest, 0, -1)
        return next((n for n in lengths if any(stop.startswith(self._kept[-n:]) for stop in self._stops)), 0)
