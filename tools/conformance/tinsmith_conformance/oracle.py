"""Tinker's documented losses and AdamW, in float64.

A loss has a value and its derivatives by the logprobs. Both follow from logprobs that a server returns, whatever its
model. A pass whose weights are minus these derivatives, with cross entropy, has the same gradient as the loss itself.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Loss:
    value: float
    by_logprobs: Floats


def importance_sampling(p: Floats, q: Floats, A: Floats, config: Mapping[str, float], mask: Floats) -> Loss:
    del config, mask
    ratio = np.exp(p - q)
    return Loss(float(-(ratio * A).sum()), -ratio * A)


def ppo(p: Floats, q: Floats, A: Floats, config: Mapping[str, float], mask: Floats) -> Loss:
    del mask
    return _clipped(np.exp(p - q), A, config.get("clip_low_threshold", 0.8), config.get("clip_high_threshold", 1.2))


def gspo(p: Floats, q: Floats, A: Floats, config: Mapping[str, float], mask: Floats) -> Loss:
    kept = mask != 0
    ratio = np.full_like(p, np.exp((p - q)[kept].mean()) if kept.any() else 1.0)
    return _clipped(ratio, A, config["clip_low_threshold"], config["clip_high_threshold"])


def cispo(p: Floats, q: Floats, A: Floats, config: Mapping[str, float], mask: Floats) -> Loss:
    del mask
    low, high = config.get("clip_low_threshold", 0.0), config.get("clip_high_threshold", 4.0)
    factor = np.clip(np.exp(p - q), low, high) * A
    return Loss(float(-(factor * p).sum()), -factor)


def dro(p: Floats, q: Floats, A: Floats, config: Mapping[str, float], mask: Floats) -> Loss:
    del mask
    beta = config["beta"]
    return Loss(float(-(p * A - beta / 2 * (p - q) ** 2).sum()), -(A - beta * (p - q)))


def _clipped(ratio: Floats, A: Floats, low: float, high: float) -> Loss:
    plain, clipped = ratio * A, np.clip(ratio, low, high) * A
    taken = np.minimum(plain, clipped)
    return Loss(float(-taken.sum()), np.where(plain <= clipped, -plain, 0.0))


RL: Final[Mapping[str, Callable[..., Loss]]] = {
    "importance_sampling": importance_sampling,
    "ppo": ppo,
    "cispo": cispo,
    "dro": dro,
    "gspo": gspo,
}


class AdamW:
    """Torch's AdamW, on one array, with gradients from outside."""

    def __init__(self, weights: Floats) -> None:
        self.weights = weights.astype(np.float64)
        self._first = np.zeros_like(self.weights)
        self._second = np.zeros_like(self.weights)
        self._steps = 0

    def step(self, gradient: Floats, **params: Any) -> None:
        lr, beta1, beta2 = (params.get(name, default) for name, default in _DEFAULTS)
        self._steps += 1
        self.weights = self.weights * (1 - lr * params.get("weight_decay", 0.0))
        self._first = beta1 * self._first + (1 - beta1) * gradient
        self._second = beta2 * self._second + (1 - beta2) * gradient**2
        first = self._first / (1 - beta1**self._steps)
        second = self._second / (1 - beta2**self._steps)
        self.weights = self.weights - lr * first / (np.sqrt(second) + params.get("eps", 1e-12))


_DEFAULTS: Final = (("learning_rate", 1e-4), ("beta1", 0.9), ("beta2", 0.95))
