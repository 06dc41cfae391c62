"""What this process and its host use, without a framework: memory, CPU time, GPUs, network."""

import importlib
import logging
import os
import resource
import socket
from pathlib import Path
from typing import Any, Final

from tinsmith.figures import Gpu, HostReport, Interface

_PERCENT: Final = 100

_log = logging.getLogger(__name__)


def usage_of_host(gpus: tuple[Gpu, ...], *, with_network: bool = True) -> HostReport:
    """Return what this process uses, and the traffic of its host. `gpus`: as they were read."""
    traffic = interfaces() if with_network else ()
    return HostReport(socket.gethostname(), resident_bytes(), cpu_s(), gpus, traffic)


def resident_bytes() -> int:
    """Return the memory of this process, 0 where the system has no such file."""
    try:
        pages = int(Path("/proc/self/statm").read_text(encoding="utf-8").split()[1])
    except OSError:
        return 0
    return pages * os.sysconf("SC_PAGE_SIZE")


_RECEIVED, _SENT = 0, 8  # columns of the table


def interfaces(table: Path = Path("/proc/self/net/dev")) -> tuple[Interface, ...]:
    """Return the network interfaces that have carried anything; none where the system has no such table."""
    try:
        lines = table.read_text(encoding="utf-8").splitlines()[2:]  # below two lines of headings
    except OSError:
        return ()
    rows = [(name.strip(), counts.split()) for name, _, counts in (line.partition(":") for line in lines)]
    found = [Interface(name, int(counts[_RECEIVED]), int(counts[_SENT])) for name, counts in rows]
    return tuple(each for each in found if each.received_bytes or each.sent_bytes)


def cpu_s() -> float:
    """Return the CPU time of this process so far."""
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
