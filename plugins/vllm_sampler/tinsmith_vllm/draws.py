"""One draw for all rows of a step, keyed by the seed of each row's sequence and its position.

vLLM gives each request that has a seed a random generator, and launches a kernel for every one of them in every step.
Here a row needs one number, which is hashed on the host: its place in the cumulative distribution. The distribution is
summed in integers, so that a row's result depends neither on the other rows nor on the order of a device's additions,
and does not change with the release of vLLM.

Runs in vLLM's workers. Array suffixes: R = rows, V = vocabulary.
"""

from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch

_ONE: Final = float(1 << 40)
"""What all probabilities add up to, but for rounding. Tokens less likely than 1 in 2**41 are not drawn."""

_STEP: Final = np.uint64(0x9E3779B97F4A7C15)


def draw(logits_RV: torch.Tensor, places_R: npt.NDArray[np.float64]) -> torch.Tensor:
    """Return a token for each row. `places_R` are numbers in [0, 1); excluded tokens have the logit -inf.

    A row whose logits are not finite gets the last token, and a NaN as its logprob: the sampler refuses its request.
    """
    shares_RV = logits_RV.softmax(dim=-1, dtype=torch.float32).nan_to_num(nan=0.0)
    weights_RV = (shares_RV * _ONE).round().long()
    ends_RV = weights_RV.cumsum(dim=-1)
    places = torch.from_numpy(places_R).to(logits_RV.device, non_blocking=True)
    wanted_R = (places * ends_RV[:, -1]).floor().long()
    return torch.searchsorted(ends_RV, wanted_R[:, None], right=True)[:, 0].clamp_(max=logits_RV.shape[-1] - 1)


def places(seeds: Any, positions: Any) -> npt.NDArray[np.float64]:
    """Hash seeds (below 2**63) and positions in their sequences to numbers in [0, 1): SplitMix64, twice."""
    mixed = _mix(np.asarray(seeds, np.uint64))
    mixed = _mix(mixed + (np.asarray(positions, np.uint64) + np.uint64(1)) * _STEP)
    return (mixed >> np.uint64(12)).astype(np.float64) / float(1 << 52)


def _mix(x: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Steele, Lea, Flood: Fast Splittable Pseudorandom Number Generators (2014). Wraps around by design."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
