"""Matrices of 4-bit integers, as compressed-tensors packs them: Kimi-K2-Thinking's experts are published so.

The three tensors of a matrix are those of 8-bit integers (`int8.py`), but `X.weight_packed` is int32 [out, in / 8],
rounded up: it holds the integers, each plus 8, two in a byte, the first in its lower half. They are not kept as
integers: a backend reads the matrices that they represent.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from tinsmith_checkpoints.huggingface.int8 import check_packing
from tinsmith_checkpoints.values import Json

EACH: Final = 8
"""Integers in one of the packed tensor's."""

_OFFSET: Final = 8


def without_int4(config: Mapping[str, Json], path: Path) -> Mapping[str, Json]:
    """Return the settings without this quantisation, of which files tell by the names of their tensors.

    `path` names config.json in errors. Raise ConfigError for other packings of 4-bit integers.
    """
    found: Mapping[str, Any] = config.get("quantization_config") or {}
    groups: Mapping[str, Any] = found.get("config_groups") or {}
    if [(group.get("weights") or {}).get("num_bits") for group in groups.values()] != [4]:
        return config
    check_packing(found, path, num_bits=4)
    return {**config, "quantization_config": None}


def unpacked(packed: npt.NDArray[np.int32], columns: int) -> npt.NDArray[np.int8]:
    """Unpack the integers [rows, columns] of some rows."""
    both = np.ascontiguousarray(packed).view(np.uint8)
    stored = np.stack([both & 15, both >> 4], axis=-1).reshape(len(packed), -1)
    return stored[:, :columns].astype(np.int8) - np.int8(_OFFSET)
