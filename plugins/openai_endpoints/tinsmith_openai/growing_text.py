"""The text of a sequence while its tokens come."""

from collections.abc import Iterable, Sequence

from tinsmith_openai.stop_strings import StopStrings
from tinsmith_openai.texts import ModelText


class GrowingText:
    """Yields text that later tokens cannot change.

    It keeps back an unfinished character, and a possible beginning of a stop string.
    """

    def __init__(self, text: ModelText, stop_strings: Sequence[str], *, marks: bool = False) -> None:
        """`marks`: with those special tokens that mark reasoning and calls."""
        self._step = text.stepwise(marks=marks)
        self._stops = StopStrings(stop_strings)
        self._kept = ""
        self._ended = False

    def add(self, tokens: Iterable[int]) -> str:
        """Return the text that is certain now, without what was returned before."""
        for token in tokens:
            if self._ended:  # a stop string was found: what follows is not part of the text
                break
            more = self._step(token)
            begins = self._stops.read(more)
            self._kept += more
            if begins is not None:
                self._kept, self._ended = self._kept[: len(self._kept) - len(more) + begins], True
        certain = len(self._kept) if self._ended else len(self._kept) - self._stops.num_begun
        said, self._kept = self._kept[:certain], self._kept[certain:]
        return said
