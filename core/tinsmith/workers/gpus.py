"""How many GPUs this machine offers, without a framework."""

import os
import re
from collections.abc import Mapping
from itertools import takewhile
from pathlib import Path


def count_gpus(environment: Mapping[str, str] = os.environ, devices: Path = Path("/dev")) -> int:
    """Return the number of NVIDIA GPUs that CUDA will see."""
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:  # CUDA ignores what follows an invalid entry
        return len(list(takewhile(lambda each: each.strip() not in {"", "-1", "NoDevFiles"}, visible.split(","))))
    return sum(re.fullmatch(r"nvidia\d+", device.name) is not None for device in devices.glob("nvidia*"))
