"""Matrices of 8-bit floating-point numbers (E4M3), of which each block of 128 x 128 shares a scale, as DeepSeek V3's.

A matrix `X.weight` [out, in] holds the numbers, and `X.weight_scale_inv` [out / 128, in / 128], rounded up, what those
of a block are multiplied by.
"""

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from tinsmith_checkpoints.errors import ConfigError
from tinsmith_checkpoints.values import Json

DTYPE: Final = "F8_E4M3"
"""Its name in safetensors files."""
SCALE: Final = "_scale_inv"
"""What follows a matrix's name in the name of its scales."""
BLOCK: Final = 128

_BIAS: Final = 7  # of exponents of two


def _numbers() -> npt.NDArray[np.float32]:
    """Return what each byte represents: a sign, four bits of exponent, three of mantissa; no infinities."""
    byte = np.arange(128)
    exponent, mantissa = byte >> 3, byte & 7
    normal = np.ldexp(8.0 + mantissa, exponent - _BIAS - 3)
    positive = np.where(exponent == 0, np.ldexp(mantissa.astype(np.float64), -_BIAS - 2), normal)
    positive[127] = np.nan
    both: npt.NDArray[np.float32] = np.concatenate([positive, -positive]).astype(np.float32)
    return both


_NUMBERS: Final = _numbers()


def without_fp8(config: Mapping[str, Json], path: Path) -> Mapping[str, Json]:
    """Return the settings without this quantisation, of which files tell by the names of their tensors.

    `path` names config.json in errors. Raise ConfigError for blocks of another size.
    """
    found: Mapping[str, Any] = config.get("quantization_config") or {}
    if found.get("quant_method") != "fp8":
        return config
    if list(found.get("weight_block_size") or ()) != [BLOCK, BLOCK]:
        size = found.get("weight_block_size")
        msg = (
            f"{path}: quantization_config.weight_block_size is {size!r}, supported is [{BLOCK}, {BLOCK}]; "
            "convert the model to bfloat16"
        )
        raise ConfigError(msg)
    return {**config, "quantization_config": None}


def num_scales(shape: tuple[int, ...]) -> tuple[int, int]:
    rows, columns = shape
    return -(-rows // BLOCK), -(-columns // BLOCK)


def dequantised(
    numbers: npt.NDArray[np.uint8], scales: npt.NDArray[Any], first_row: int = 0
) -> npt.NDArray[np.float32]:
    """Return what some rows of a matrix represent, given their bytes [rows, in] and all scales."""
    rows = np.arange(first_row, first_row + len(numbers)) // BLOCK
    columns = np.arange(numbers.shape[1]) // BLOCK
    of_numbers: npt.NDArray[np.float32] = scales.astype(np.float32)[rows][:, columns]
    return _NUMBERS[numbers] * of_numbers


def quantised_matrices(names: Collection[str]) -> set[str]:
    """Return the matrices that the tensors of these names are."""
    return {name.removesuffix(SCALE) for name in names if name.endswith(f".weight{SCALE}")} & set(names)
