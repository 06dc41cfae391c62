"""The GPUs that this machine offers, without a framework, and what to say of one that a framework cannot use."""

import os
import re
from collections.abc import Mapping
from itertools import takewhile
from pathlib import Path

from tinsmith.errors import ConfigError

VISIBLE = "CUDA_VISIBLE_DEVICES"


def count_gpus(environment: Mapping[str, str] = os.environ, devices: Path = Path("/dev")) -> int:
    """Return the number of NVIDIA GPUs that CUDA will see."""
    visible = environment.get(VISIBLE)
    if visible is not None:  # CUDA ignores what follows an invalid entry
        return len(list(takewhile(lambda each: each.strip() not in {"", "-1", "NoDevFiles"}, visible.split(","))))
    return sum(re.fullmatch(r"nvidia\d+", device.name) is not None for device in devices.glob("nvidia*"))


def lacks_gpus(who: str, reason: str, remedy: str) -> ConfigError:
    """Return the error of a framework that sees none of the GPUs, which are there or were asked for.

    It is refused, because the CPU would take their place in silence.

    Args:
        who: the framework, with its version.
        reason: in its own words.
        remedy: what to install, or which setting asks for the CPU.
    """
    visible, number = os.environ.get(VISIBLE), count_gpus()
    if visible:
        offered = f"{VISIBLE} is {visible!r}"
    else:
        offered = f"this machine has {number or 'no'} NVIDIA GPU{'' if number == 1 else 's'}"
    return ConfigError(f"{who} sees no GPU ({reason}), and {offered}: {remedy}")
