"""Base models whose matrices are 8-bit integers, as compressed-tensors packs them: its scheme W8A16.

A matrix `X.weight` [out, in] is three tensors. `X.weight_packed` (int32 [out, in / 4], rounded up) holds the integers,
each plus 128, as bytes in order; `X.weight_scale` [out, G] what each group of a row's columns is multiplied by;
`X.weight_shape` [out, in]. Format: https://github.com/vllm-project/compressed-tensors, `pack-quantized`.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from tinsmith_checkpoints.errors import ConfigError
from tinsmith_checkpoints.values import Json

PACKED: Final = "_packed"
SCALE: Final = "_scale"
SHAPE: Final = "_shape"
"""Suffixes that a matrix's three tensors add to its name."""

W8A16: Final[dict[str, Json]] = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "quantization_status": "compressed",
    "ignore": ["lm_head"],
    "kv_cache_scheme": None,
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "input_activations": None,
            "output_activations": None,
            "weights": {
                "num_bits": 8,
                "type": "int",
                "strategy": "group",
                "group_size": 128,
                "symmetric": True,
                "dynamic": False,
            },
        }
    },
}
"""The quantization_config of such a model, with the defaults of the scheme."""

_OFFSET: Final = 0x80  # adding 128 to an 8-bit integer inverts its first bit
_MAKE_ONE: Final = "quantise it with compressed-tensors' preset W8A16, and ignore lm_head"


@dataclass(frozen=True, slots=True)
class Int8:
    """How the integers of a model are scaled."""

    group_size: int | None  # columns of a row that have one scale; None: all of them

    def num_scales(self, columns: int) -> int:
        """Return the number of scales of a row with this many columns."""
        return 1 if self.group_size is None else -(-columns // self.group_size)


def read_int8(config: Mapping[str, Json], path: Path) -> Int8 | None:
    """Return how the matrices of the layers are quantised; None: they are not.

    `path` names config.json in errors. Raise ConfigError if the model is quantised in another way.
    """
    found = config.get("quantization_config")
    if not found:
        return None
    check_packing(found, path, num_bits=8)
    (group,) = found["config_groups"].values()
    return Int8(int(group["weights"]["group_size"]) if group["weights"]["strategy"] == "group" else None)


def check_packing(found: Mapping[str, Json], path: Path, *, num_bits: int) -> None:
    """Raise ConfigError unless a quantization_config packs integers of so many bits as this module says."""
    for key, value, allowed in _settings(found, num_bits):
        if value not in allowed:
            supported = " or ".join(repr(each) for each in allowed if each not in (None, {}) or len(allowed) == 1)
            msg = f"{path}: quantization_config.{key} is {value!r}, supported is {supported or 'none'}; {_MAKE_ONE}"
            raise ConfigError(msg)


def _settings(config: Mapping[str, Json], num_bits: int) -> list[tuple[str, Json, tuple[Json, ...]]]:
    """List the settings that decide the layout: each one's place, its value, and the values allowed."""
    groups = config.get("config_groups") or {}
    name: str = next(iter(groups), "group_0")
    group: dict[str, Any] = groups.get(name, {})
    weights: dict[str, Any] = group.get("weights") or {}
    of_group, of_weights = f"config_groups.{name}", f"config_groups.{name}.weights"
    return [
        ("quant_method", config.get("quant_method"), ("compressed-tensors",)),
        ("format", config.get("format"), ("pack-quantized",)),
        ("kv_cache_scheme", config.get("kv_cache_scheme"), (None, {})),
        ("sparsity_config", config.get("sparsity_config"), (None, {})),
        ("transform_config", config.get("transform_config"), (None, {})),
        ("config_groups", len(groups), (1,)),
        (f"{of_group}.targets", group.get("targets"), (["Linear"],)),
        (f"{of_group}.format", group.get("format"), ("pack-quantized", None)),
        (f"{of_group}.input_activations", group.get("input_activations"), (None,)),
        (f"{of_group}.output_activations", group.get("output_activations"), (None,)),
        (f"{of_weights}.num_bits", weights.get("num_bits"), (num_bits,)),
        (f"{of_weights}.type", weights.get("type"), ("int",)),
        (f"{of_weights}.strategy", weights.get("strategy"), ("channel", "group")),
        (f"{of_weights}.symmetric", weights.get("symmetric"), (True,)),
        (f"{of_weights}.dynamic", weights.get("dynamic", False), (False,)),
        (f"{of_weights}.actorder", weights.get("actorder"), (None,)),
    ]


def packed_columns(columns: slice) -> slice:
    """Return the columns of the packed tensor that hold these columns of the matrix."""
    return slice(columns.start // 4, -(-columns.stop // 4))


def unpacked(packed: npt.NDArray[np.int32], columns: slice) -> npt.NDArray[np.int8]:
    """Unpack the integers of these columns of the matrix from the columns `packed_columns`."""
    first = columns.start % 4
    stored = np.ascontiguousarray(packed).view(np.uint8)
    return (stored[:, first : first + columns.stop - columns.start] ^ np.uint8(_OFFSET)).view(np.int8)


def dequantised(
    integers: npt.NDArray[np.int8], scales: npt.NDArray[Any], columns: slice, size: int
) -> npt.NDArray[np.float32]:
    """Return the numbers that integers stand for: some rows, of which these columns of `size`, and all scales."""
    each = -(-size // scales.shape[1])
    of_columns = np.repeat(scales.astype(np.float32), each, axis=1)[:, columns] if scales.shape[1] > 1 else scales
    return integers.astype(np.float32) * of_columns.astype(np.float32)


def quantised_matrices(names: Collection[str]) -> set[str]:
    """Return the matrices of which the tensors of these names are parts."""
    found = {name.removesuffix(PACKED) for name in names if name.endswith(f".weight{PACKED}")}
    return {name for name in found if f"{name}{SCALE}" in names}
