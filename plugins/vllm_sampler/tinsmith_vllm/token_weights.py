"""The weights of tokens: integers, which every device computes alike from their logits.

There is no exp, and no product that is fused with an addition. Array suffixes: R = rows, V = vocabulary.
"""

from typing import Final

import torch

LOG2_E: Final = 1.4426950408889634
POWERS: Final = (1.0, 0.6931471824645996, 0.24022646, 0.05550329, 0.00961852, 0.001339986, 0.00015337578)
"""Coefficients of 2**f for f in [-0.5, 0.5], lowest power first: 1e-7 of it at most."""
LEAST: Final = -64.0
"""Tokens below 2**LEAST of the likeliest one have no weight, as anything below 2**-ONE_BITS."""
ONE_BITS: Final = 40
"""The likeliest token weighs 2**ONE_BITS, and the sum of 2**18 tokens still fits 63 bits."""
EXPONENT: Final = 127 + ONE_BITS
"""Added to n, the exponent field of the float32 number 2**(n + ONE_BITS)."""


def weights_of(logits_RV: torch.Tensor) -> torch.Tensor:
    """Return round(2**ONE_BITS exp(logit - largest)), about: int64 [R, V]. Rows that are not finite have none.

    Each operation is one of torch, so that no compiler fuses two of them.
    """
    largest_R1 = logits_RV.amax(dim=-1, keepdim=True)
    finite_R1 = largest_R1.isfinite()
    exponents = (logits_RV - largest_R1.where(finite_R1, 0.0)).mul_(LOG2_E).clamp_(min=LEAST)
    whole = (exponents + 0.5).floor_()
    rest = exponents.sub_(whole)
    powers = rest * POWERS[-1]
    for coefficient in POWERS[-2:0:-1]:
        powers.add_(coefficient).mul_(rest)
    powers.add_(POWERS[0])
    scale = whole.int().add_(EXPONENT).bitwise_left_shift_(23).view(torch.float32)
    return powers.mul_(scale).long().mul_(finite_R1)
