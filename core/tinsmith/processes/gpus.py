"""The GPUs of this host, as NVIDIA's management library tells. The package `nvidia-ml-py` is optional."""

from __future__ import annotations

import importlib
import logging
from typing import Any, Final

from tinsmith.figures import Gpu

_PERCENT: Final = 100

_log = logging.getLogger(__name__)


class Gpus:
    """Without the package, the library or a card there are none. `any` is constant from the first look on."""

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
