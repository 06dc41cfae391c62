"""A line of the log for what an engine has done and what waits, every ten seconds while there is work."""

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Final

from tinsmith.errors import ServerError
from tinsmith.figures import OPERATION_SECONDS, TOKENS, Figures
from tinsmith.log_fields import about
from tinsmith.store import OperationState, RequestStore

EVERY_S: Final = 10.0

_log = logging.getLogger(__name__)


class Throughput:
    """Compares the figures of an engine with those that it found last."""

    def __init__(
        self, base_model: str, store: RequestStore, figures: Figures, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._base_model = base_model
        self._store = store
        self._figures = figures
        self._clock = clock
        self._last_s, self._operations, self._trained, self._sampled = clock(), *self._read()

    async def run(self) -> None:
        """Log until cancelled."""
        while True:
            await asyncio.sleep(EVERY_S)
            try:
                await self.log()
            except ServerError as error:  # whoever needs the store says so
                _log.debug("cannot read what waits: %s", error)

    async def log(self) -> None:
        """Log what has been done since the last call, and what is left. If both are nothing, log nothing."""
        pending = [each for each in await self._store.list_pending() if each.base_model == self._base_model]
        number = {state: sum(each.number for each in pending if each.state is state) for state in OperationState}
        now_s, (operations, trained, sampled) = self._clock(), self._read()
        took_s, done = now_s - self._last_s, operations - self._operations
        if done or pending:
            _log.info(
                "%s: %.0f tokens/s trained, %.0f sampled; %d operations in %.0f s, %d running, %d queued",
                self._base_model,
                (trained - self._trained) / took_s,
                (sampled - self._sampled) / took_s,
                done,
                took_s,
                number[OperationState.RUNNING],
                number[OperationState.QUEUED],
                extra=about(base_model=self._base_model),
            )
        self._last_s, self._operations, self._trained, self._sampled = now_s, operations, trained, sampled

    def _read(self) -> tuple[int, float, float]:
        """Return how many operations have finished, and how many tokens were trained and sampled."""
        finished = sum(sum(each.counts) for each in self._figures.series() if each.name == OPERATION_SECONDS.name)
        return finished, self._figures.total(TOKENS, "trained"), self._figures.total(TOKENS, "sampled")
