"""Tokens on their way to clients that read them while they are drawn.

Nothing depends on them: the result of a sample has all its tokens, whatever was lost on the way.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

from tinsmith.backend import OnTokens
from tinsmith.errors import StoreError
from tinsmith.store import MOST_TOKENS, DrawnTokens, OperationRecord, RequestStore

_log = logging.getLogger(__name__)

EVERY_S: Final = 0.02
"""The least time between two tellings. The first tokens are told at once, those that come meanwhile together."""


@dataclass(frozen=True, slots=True)
class _Run:
    """Tokens of a sequence that follow one another."""

    first: int
    tokens: list[int]

    @property
    def end(self) -> int:
        return self.first + len(self.tokens)


class TokenTeller:
    """Passes on the tokens that the sampler reports of streamed samples."""

    def __init__(self, store: RequestStore, *, pause: Callable[[float], Awaitable[None]] = asyncio.sleep) -> None:
        self._store = store
        self._pause = pause
        self._untold: dict[tuple[str, int, int], list[_Run]] = {}  # by sampling session, seq_id and sequence
        self._any = asyncio.Event()

    @contextmanager
    def telling(self, record: OperationRecord) -> Iterator[OnTokens]:
        """Yield a callback that passes a sample's tokens on. Untold tokens come with the result."""

        def tell(sequence: int, first: int, tokens: Sequence[int]) -> None:
            runs = self._untold.setdefault((record.subject_id, record.seq_id, sequence), [])
            if runs and runs[-1].end == first:
                runs[-1].tokens.extend(tokens)
            else:
                runs.append(_Run(first, list(tokens)))
            self._any.set()

        try:
            yield tell
        finally:
            for key in [key for key in self._untold if key[:2] == (record.subject_id, record.seq_id)]:
                del self._untold[key]

    async def run(self) -> None:
        """Tell until cancelled."""
        while True:
            await self._any.wait()
            self._any.clear()
            try:
                await self._store.tell_drawn(self._take())
            except StoreError as error:  # a result that cannot be recorded either is retried; this comes with it
                _log.debug("tokens were not told: %s", error)
            await self._pause(EVERY_S)

    def _take(self) -> list[DrawnTokens]:
        untold, self._untold = self._untold, {}
        return [
            DrawnTokens(
                sampling_session_id=subject_id,
                seq_id=seq_id,
                sequence=sequence,
                first=run.first + at,
                tokens=run.tokens[at : at + MOST_TOKENS],
            )
            for (subject_id, seq_id, sequence), runs in untold.items()
            for run in runs
            for at in range(0, len(run.tokens), MOST_TOKENS)
        ]
