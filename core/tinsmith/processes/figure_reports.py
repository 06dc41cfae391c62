"""Reports an engine's figures to the store, every few seconds in which something has changed."""

import asyncio
import logging
import os
import resource
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Final

from tinsmith.errors import LeaseLostError, ServerError
from tinsmith.figures import Figures, HostReport, Report, encode_report
from tinsmith.processes.gpus import Gpus
from tinsmith.store import Lease, RequestStore

_EVERY_S: Final = 5.0

_log = logging.getLogger(__name__)


@asynccontextmanager
async def reporting(store: RequestStore, lease: Lease, figures: Figures) -> AsyncIterator[None]:
    """Report in the background while the block runs, and once more at its end."""
    reports = FigureReports(store, lease, figures)
    task = asyncio.create_task(reports.run(), name="figure-reports")
    try:
        yield
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task
        with suppress(LeaseLostError, ServerError):
            await reports.send()


class FigureReports:
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
        """Report what has changed. Counting the commits of the reports themselves is no reason for one."""
        gpus = await asyncio.to_thread(self._gpus.read) if self._gpus.any else ()
        series = self._figures.series()
        changed = (gpus, [each for each in series if not each.name.startswith("store_")])
        if changed == self._sent:
            return
        host = HostReport(socket.gethostname(), resident_bytes(), _cpu_s(), gpus)
        await self._store.report_figures(self._lease, encode_report(Report(series, host)))
        self._sent = changed


def resident_bytes() -> int:
    """Return the memory of this process, 0 where the system has no such file."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except OSError:
        return 0
    return pages * os.sysconf("SC_PAGE_SIZE")


def _cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime
