"""Tokens of a sample as they arrive: each once and in order, whatever is told twice or lost."""

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import ClassVar

from tinsmith.errors import ServerError
from tinsmith.operations import SampleOutput
from tinsmith.store import DrawnTokens


class DrawnAgainError(ServerError):
    """A client has read tokens that are not in the result."""

    public: ClassVar[bool] = True


class HeardTokens:
    """What was heard of one sample."""

    def __init__(self, hear: Callable[[int, Sequence[int]], None]) -> None:
        """`hear` is called with a sequence's number, and its next tokens."""
        self._hear = hear
        self._heard: defaultdict[int, list[int]] = defaultdict(list)

    def add(self, piece: DrawnTokens) -> None:
        """Pass on what is new. Behind a gap, nothing is: it comes with the result."""
        known = len(self._heard[piece.sequence])
        if piece.first <= known:
            self._add(piece.sequence, piece.tokens[known - piece.first :])

    def finish(self, output: SampleOutput) -> None:
        """Pass on the rest. Raise DrawnAgainError if the result does not begin with what was passed on."""
        for index, sequence in enumerate(output.sequences):
            tokens, heard = sequence.tokens.tolist(), self._heard[index]
            if tokens[: len(heard)] != heard:
                msg = (
                    "the engine ended while it drew this sample, and drew it again with other tokens than those that "
                    "were streamed; send the request again"
                )
                raise DrawnAgainError(msg)
            self._add(index, tokens[len(heard) :])

    def _add(self, sequence: int, tokens: Sequence[int]) -> None:
        if tokens:
            self._heard[sequence].extend(tokens)
            self._hear(sequence, tokens)
