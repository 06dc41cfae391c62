"""Reports an engine's figures to the store, every few seconds in which something has changed."""

import asyncio
import importlib
import logging
import os
import resource
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any, Final

from tinsmith.errors import LeaseLostError, ServerError
from tinsmith.figures import Figures, Gpu, HostReport, Interface, Report, encode_report
from tinsmith.stopping import alongside
from tinsmith.store import Lease, RequestStore

_EVERY_S: Final = 5.0
_PERCENT: Final = 100

_log = logging.getLogger(__name__)


@asynccontextmanager
async def reporting(store: RequestStore, lease: Lease, figures: Figures) -> AsyncIterator[None]:
    """Report in the background while the block runs, and once more at its end."""
    reports = _FigureReports(store, lease, figures)
    try:
        async with alongside(reports.run(), name="figure-reports"):
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
        series = self._figures.series()
        changed = (gpus, [each for each in series if not each.name.startswith("store_")])
        if changed == self._sent:
            return
        host = HostReport(socket.gethostname(), resident_bytes(), _cpu_s(), gpus, interfaces())
        await self._store.report_figures(self._lease, encode_report(Report(series, host)))
        self._sent = changed


def resident_bytes() -> int:
    """Return the memory of this process, 0 where the system has no such file."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except OSError:
        return 0
    return pages * os.sysconf("SC_PAGE_SIZE")


_RECEIVED, _SENT = 0, 8  # columns of the table


def interfaces(table: Path = Path("/proc/self/net/dev")) -> tuple[Interface, ...]:
    """Return the network interfaces that have carried anything; none where the system has no such table."""
    try:
        lines = table.read_text().splitlines()[2:]  # below two lines of headings
    except OSError:
        return ()
    rows = [(name.strip(), counts.split()) for name, _, counts in (line.partition(":") for line in lines)]
    found = [Interface(name, int(counts[_RECEIVED]), int(counts[_SENT])) for name, counts in rows]
    return tuple(each for each in found if each.received_bytes or each.sent_bytes)


def _cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


class Gpus:
    """The GPUs of this host, as NVIDIA's management library tells. `any` is constant from the first look on.

    The package `nvidia-ml-py` is optional. Without it, the library or a card there are none.
    """

    def __init__(self) -> None:
        self._nvml: Any = None  # the package has no types
        self._handles: list[tuple[int, Any]] = []
        try:
            self._nvml = importlib.import_module("pynvml")
            self._nvml.nvmlInit()
            number = self._nvml.nvmlDeviceGetCount()
            self._handles = [(index, self._nvml.nvmlDeviceGetHandleByIndex(index)) for index in range(number)]
        except ModuleNotFoundError:
            _log.debug("nvidia-ml-py is not installed, so no figures of GPUs are reported")
        except self._nvml.NVMLError as error:  # it is installed also where there is no driver
            _log.debug("no figures of GPUs: %s", error)

    @property
    def any(self) -> bool:
        return bool(self._handles)

    def read(self) -> tuple[Gpu, ...]:
        """Return those that answer. Takes milliseconds."""
        found = (self._read(number, handle) for number, handle in self._handles)
        return tuple(gpu for gpu in found if gpu is not None)

    def _read(self, number: int, handle: Any) -> Gpu | None:
        try:
            memory = self._nvml.nvmlDeviceGetMemoryInfo(handle)
            uuid, name = self._nvml.nvmlDeviceGetUUID(handle), self._nvml.nvmlDeviceGetName(handle)
        except self._nvml.NVMLError as error:
            _log.debug("GPU %d does not answer: %s", number, error)
            return None
        return Gpu(uuid, number, name, self._utilisation(handle), int(memory.used), int(memory.total))

    def _utilisation(self, handle: Any) -> float | None:
        """A card that is divided (MIG) does not tell."""
        try:
            return float(self._nvml.nvmlDeviceGetUtilizationRates(handle).gpu) / _PERCENT
        except self._nvml.NVMLError:
            return None
