"""Reports an engine's figures to the store, every few seconds in which something has changed."""

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Final

from tinsmith.errors import LeaseLostError, ServerError
from tinsmith.figures import Figures, Report, encode_report
from tinsmith.host_usage import Gpus, usage_of_host
from tinsmith.lasting import alongside
from tinsmith.store import Lease, RequestStore

_EVERY_S: Final = 5.0

_log = logging.getLogger(__name__)


@asynccontextmanager
async def reporting(store: RequestStore, lease: Lease, figures: Figures) -> AsyncIterator[None]:
    """Report in the background while the block runs, and once more at its end."""
    reports = _FigureReports(store, lease, figures)
    try:
        async with alongside(reports.run, name="figure-reports"):
            yield
    finally:
        with suppress(LeaseLostError, ServerError):
            await reports.send()


class _FigureReports:
    def __init__(self, store: RequestStore, lease: Lease, figures: Figures) -> None:
        self._store = store
        self._lease = lease
        self._figures = figures
        self._gpus = Gpus()
        self._sent: object = None

    async def run(self) -> None:
        """Report until cancelled, or until another engine has taken over."""
        while True:
            try:
                await self.send()
            except LeaseLostError:
                return  # `hold_lease` ends the engine
            except ServerError as error:
                _log.debug("cannot report figures: %s", error)
            await asyncio.sleep(_EVERY_S)

    async def send(self) -> None:
        """Report what has changed. Commits of the reports themselves, and traffic, are no reason for one."""
        gpus = await asyncio.to_thread(self._gpus.read) if self._gpus.any else ()
        series, workers = self._figures.series(), self._figures.workers()
        own = [each for each in series if not each.name.startswith("store_")]
        memory = self._figures.memory
        changed = gpus, [each.gpus for each in workers], own, memory
        if changed == self._sent:
            return
        report = Report(series, usage_of_host(gpus), workers, memory)
        await self._store.report_figures(self._lease, encode_report(report))
        self._sent = changed
