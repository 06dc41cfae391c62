"""Matrices of experts in MXFP4, as gpt-oss has them: 4-bit floating-point numbers, 32 of which share a scale.

A tensor `X` [E, in, out] is two tensors. `X_blocks` (uint8 [E, out, in / 32, 16]) holds the numbers, two in a byte, the
first in its lower half; `X_scales` (uint8 [E, out, in / 32]) the exponents of two, each plus 127, that multiply them.
Format: https://www.opencompute.org/documents/ocp-microscaling-formats-mx-v1-0-spec-final-pdf (E2M1, E8M0).
"""

from typing import Final

import numpy as np
import numpy.typing as npt

BLOCKS: Final = "_blocks"
SCALES: Final = "_scales"
"""Suffixes that the tensor's two parts add to its name."""

BLOCK: Final = 32  # numbers that share a scale
_BIAS: Final = 127
_POSITIVE: Final = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_NUMBERS: Final = np.array([*_POSITIVE, *(-x for x in _POSITIVE)], np.float32)


def dequantised(blocks: npt.NDArray[np.uint8], scales: npt.NDArray[np.uint8]) -> npt.NDArray[np.float32]:
    """Return the numbers [E, in, out] that blocks [E, out, in / 32, 16] and scales stand for."""
    found = np.empty((*blocks.shape[:-1], BLOCK), np.float32)
    found[..., ::2], found[..., 1::2] = _NUMBERS[blocks & 0x0F], _NUMBERS[blocks >> 4]
    scaled = np.ldexp(found, scales[..., None].astype(np.int32) - _BIAS)
    return scaled.reshape(*blocks.shape[:2], -1).swapaxes(1, 2)
