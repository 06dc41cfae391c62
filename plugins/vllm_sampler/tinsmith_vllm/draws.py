"""One draw for all rows of a step, keyed by the seed of each row's sequence and its position.

vLLM gives each request that has a seed a random generator, and launches a kernel for every one of them in every step.
Here a row needs one number, which is hashed on the host: its quantile of the distribution.

A token's weight is an integer (token_weights.py), and weights are summed as integers. So a row's token depends neither
on the other rows, nor on the order of additions, nor on the device, nor on the release of vLLM. On GPUs, kernels of our
own do the same in two passes over the logits (fused_draws.py).

Runs in vLLM's workers. Array suffixes: R = rows, V = vocabulary.
"""

from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch

from tinsmith_vllm.token_weights import weights_of

_STEP: Final = np.uint64(0x9E3779B97F4A7C15)


def draw(logits_RV: torch.Tensor, quantiles_R: npt.NDArray[np.float64]) -> torch.Tensor:
    """Return a token for each row of float32 logits. `quantiles_R` are in [0, 1); excluded tokens have the logit -inf.

    A row whose logits are not finite gets the last token, and a NaN as its logprob: the sampler refuses its request.
    """
    quantiles = torch.from_numpy(quantiles_R).to(logits_RV.device, non_blocking=True)
    if logits_RV.is_cuda:
        from tinsmith_vllm.fused_draws import fused_draw

        return fused_draw(logits_RV, quantiles)
    return draw_by_torch(logits_RV, quantiles)


def draw_by_torch(logits_RV: torch.Tensor, quantiles_R: torch.Tensor) -> torch.Tensor:
    """Do it with torch's operations, on any device. `quantiles_R` is float64, and on the same device."""
    ends_RV = weights_of(logits_RV).cumsum(dim=-1)
    wanted_R = (quantiles_R * ends_RV[:, -1]).floor().long()
    return torch.searchsorted(ends_RV, wanted_R[:, None], right=True)[:, 0].clamp_(max=logits_RV.shape[-1] - 1)


def quantiles(seeds: Any, positions: Any) -> npt.NDArray[np.float64]:
    """Hash seeds (below 2**63) and positions in their sequences to numbers in [0, 1): SplitMix64, twice."""
    mixed = _mix(np.asarray(seeds, np.uint64))
    mixed = _mix(mixed + (np.asarray(positions, np.uint64) + np.uint64(1)) * _STEP)
    return (mixed >> np.uint64(12)).astype(np.float64) / float(1 << 52)


def _mix(x: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Steele, Lea, Flood: Fast Splittable Pseudorandom Number Generators (2014). Wraps around by design."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
