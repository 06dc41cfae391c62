"""The store, for tokens on their way to a client that reads them while they are drawn.

Nothing of this is kept, and anything may be lost: the result of the sample has all tokens.
"""

from abc import ABC
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Final, Self

import msgspec

MOST_TOKENS: Final = 512
"""The tokens of one piece."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DrawnTokens:
    """Tokens of one sequence of a sample, in the order in which they were drawn."""

    sampling_session_id: str
    seq_id: int
    sequence: int
    first: int  # how many tokens of the sequence come before
    tokens: Sequence[int]  # at most MOST_TOKENS

    def encoded(self) -> str:
        """Return what is not the sample's name as a text without tabs and line breaks, of at most 7 KB."""
        return msgspec.json.encode((self.sequence, self.first, self.tokens)).decode()

    @classmethod
    def decoded(cls, sampling_session_id: str, seq_id: int, text: str) -> Self:
        sequence, first, tokens = msgspec.json.decode(text, type=tuple[int, int, list[int]])
        return cls(
            sampling_session_id=sampling_session_id, seq_id=seq_id, sequence=sequence, first=first, tokens=tokens
        )


class TokenStreams(ABC):  # noqa: B024 - a store without streams is complete: the tokens come with the results
    async def tell_drawn(self, pieces: Sequence[DrawnTokens]) -> None:
        """Pass tokens on to whoever listens, in this process and in the others."""
        del pieces

    def drawn(
        self, sampling_session_id: str, seq_id: int, hear: Callable[[DrawnTokens], None]
    ) -> AbstractContextManager[None]:
        """Call `hear` with what is told of a sample meanwhile, in the thread of the event loop.

        The sample may be submitted later.
        """
        del sampling_session_id, seq_id, hear
        return _silence()


@contextmanager
def _silence() -> Iterator[None]:
    yield
