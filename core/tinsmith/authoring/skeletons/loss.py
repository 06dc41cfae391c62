"""A loss function: the focal loss (arXiv 1708.02002), which cares less about tokens that the model already knows."""

from collections.abc import Mapping
from typing import Any

import tinsmith


# Any: arrays of whichever namespace `xp` is, numpy, jax.numpy or torch; they are not written into
def skeleton(xp: Any, logp: Any, inputs: Mapping[str, Any], config: Mapping[str, Any]) -> tuple[Any, Any]:
    """Return -weight * (1 - p)**gamma * log p for every token, and its derivative by log p; gamma is at least 1."""
    gamma, weights, p = config["gamma"], inputs["weights"], xp.exp(logp)
    unsure = (1 - p) ** gamma
    return -weights * unsure * logp, -weights * (unsure - gamma * p * (1 - p) ** (gamma - 1) * logp)


@tinsmith.hookimpl
def tinsmith_register_losses() -> tinsmith.LossSpec:
    return tinsmith.LossSpec(name="skeleton", inputs=("weights",), per_token=skeleton, config={"gamma": 2.0})
