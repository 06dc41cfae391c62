"""The GPUs of this machine, their memory and its own, without a framework."""

import os
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tinsmith.host import count_gpus, host_memory
from tinsmith.lifeline import run_tethered
from tinsmith.settings import child_environment

_QUERY: Final = ("nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits")
_LIMIT_S: Final = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    devices: tuple[str, ...] = ()  # ids for CUDA_VISIBLE_DEVICES
    device_bytes: int | None = None  # of each; of unequal ones, the smallest. None: not known
    others_alike: bool = False  # what runs on other machines has such devices there, for itself alone
    host_bytes: int | None = None  # of the machine itself, or its container. None: not known

    @property
    def usable_bytes(self) -> int | None:
        """Memory of a device for backends. The rest is for the driver and gaps of allocators."""
        return None if self.device_bytes is None else self.device_bytes * 92 // 100

    @property
    def usable_host_bytes(self) -> int | None:
        """Host memory for backends on the CPU. The rest is for the system and the server."""
        return None if self.host_bytes is None else self.host_bytes * 92 // 100


def this_machine(environment: Mapping[str, str] = os.environ, devices: Path = Path("/dev")) -> Machine:
    """Find the GPUs that CUDA will see, and the machine's own memory."""
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    number = count_gpus(environment, devices)
    ids = map(str, range(number)) if visible is None else map(str.strip, visible.split(",")[:number])
    found = tuple(ids)
    return Machine(devices=found, device_bytes=_memory(found), host_bytes=host_memory())


def _memory(devices: tuple[str, ...]) -> int | None:
    """Ask the driver. The parts of a divided GPU (MIG) have less than it says, so nothing is known of them."""
    if not devices or any(each.startswith("MIG") for each in devices):
        return None
    try:
        answer = run_tethered(_QUERY, env=child_environment(), timeout_s=_LIMIT_S)
        answer.check_returncode()
    except (OSError, subprocess.SubprocessError):
        return None
    sizes = [int(line) << 20 for line in answer.stdout.decode().split() if line.isdecimal()]
    return min(sizes, default=None)
