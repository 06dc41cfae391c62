"""The loss functions of the Tinker API, written once over an array namespace.

Each maps per-token logprobs to per-token losses *and* their derivative by the logprob, so that a backend needs no
automatic differentiation through the head: the gradient of the loss by the logits follows from `dloss_dlogp` alone.
The request's loss is the plain sum over all tokens and data, never normalised. A token's loss may depend on its
whole sequence are sums over it, which a backend computes first.

`xp` is numpy, jax.numpy, torch or any module with their `exp`, `minimum`, `where`, `clip` and `zeros_like`. All arrays
of a call share one shape, but sums over sequences may only broadcast against it, as config values do, since a packed
batch holds many requests. Backends mask the padding.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

# Any: an array of whichever namespace `xp` is; no common static type exists.
Xp = Any
XpArray = Any
LossFunction = Callable[[Xp, XpArray, Mapping[str, XpArray], Mapping[str, XpArray]], tuple[XpArray, XpArray]]
Summands = Callable[[Xp, XpArray, Mapping[str, XpArray], Mapping[str, XpArray]], tuple[XpArray, ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class LossSpec:
    """A loss that a plugin offers.

    `per_token(xp, logp, inputs, config)` returns `(loss, dloss_dlogp)`, both of the shape of `logp`.

    `summands(xp, logp, inputs, config)` returns an array of that shape for each name in `sums`. Their sums over the
    token's sequence are further inputs of `per_token`, which treats them as constant. Such a loss takes one target per
    token.
    """

    name: str
    inputs: tuple[str, ...]  # in addition to target_tokens: float32, of the shape of target_tokens, all required
    per_token: LossFunction
    config: Mapping[str, float] = field(default_factory=dict)  # keys of loss_fn_config, with their defaults
    required_config: tuple[str, ...] = ()  # further keys, which have none
    stops_gradients: bool = False  # part of the loss is treated as constant, so dloss_dlogp is not the whole derivative
    sums: tuple[str, ...] = ()
    summands: Summands | None = None  # set if there are `sums`
    scaled_by: str = ""  # an input with which loss and derivative grow in proportion; off-policy corrections scale it

    @property
    def settings(self) -> tuple[str, ...]:
        """Every key of loss_fn_config, in a fixed order."""
        return tuple(sorted({*self.config, *self.required_config}))

    def of_sequence(
        self, xp: Xp, logp: XpArray, inputs: Mapping[str, XpArray], config: Mapping[str, XpArray]
    ) -> tuple[XpArray, XpArray]:
        """Do as `per_token`, given all tokens of one sequence."""
        if self.summands is not None:
            parts = self.summands(xp, logp, inputs, config)
            inputs = {**inputs, **{name: part.sum() for name, part in zip(self.sums, parts, strict=True)}}
        return self.per_token(xp, logp, inputs, config)


def cross_entropy(
    xp: Xp, logp: XpArray, inputs: Mapping[str, XpArray], config: Mapping[str, XpArray]
) -> tuple[XpArray, XpArray]:
    """-w * logp. Weights may be negative; their sum has no meaning."""
    del xp, config
    weights = inputs["weights"]
    return -weights * logp, -weights


def importance_sampling(
    xp: Xp, logp: XpArray, inputs: Mapping[str, XpArray], config: Mapping[str, XpArray]
) -> tuple[XpArray, XpArray]:
    """-r * A with r = exp(logp - q), unclipped."""
    del config
    loss = -xp.exp(logp - inputs["logprobs"]) * inputs["advantages"]
    return loss, loss  # d r / d logp = r


def ppo(xp: Xp, logp: XpArray, inputs: Mapping[str, XpArray], config: Mapping[str, XpArray]) -> tuple[XpArray, XpArray]:
    """-min(r * A, clip(r, low, high) * A): no gradient if the clipped term is the smaller one (arXiv 1707.06347)."""
    return _pessimistic(xp, xp.exp(logp - inputs["logprobs"]), inputs["advantages"], config)


def gspo(
    xp: Xp, logp: XpArray, inputs: Mapping[str, XpArray], config: Mapping[str, XpArray]
) -> tuple[XpArray, XpArray]:
    """-min(s_t * A, clip(s_t, low, high) * A), the token variant (arXiv 2507.18071, section 4.3).

    s_t has the value of s, the geometric mean of r over the tokens that `sequence_ratio_mask` marks, and the derivative
    s by the token's own logprob. If none is marked, s is 1.
    """
    del logp
    marked = inputs["num_marked"]
    mean = inputs["marked_drift"] / xp.where(marked > 0, marked, 1.0 + marked)
    return _pessimistic(xp, xp.exp(mean), inputs["advantages"], config)


def gspo_summands(
    xp: Xp, logp: XpArray, inputs: Mapping[str, XpArray], config: Mapping[str, XpArray]
) -> tuple[XpArray, ...]:
    """Return log r of the tokens that are marked, and 1 for each of them."""
    del config
    drift, marked = logp - inputs["logprobs"], inputs["sequence_ratio_mask"] != 0
    zero = xp.zeros_like(drift)
    return xp.where(marked, drift, zero), xp.where(marked, 1.0 + zero, zero)


def cispo(
    xp: Xp, logp: XpArray, inputs: Mapping[str, XpArray], config: Mapping[str, XpArray]
) -> tuple[XpArray, XpArray]:
    """-stop_gradient(clip(r, low, high)) * logp * A (arXiv 2506.13585, equation 4)."""
    ratio = _clip(xp, xp.exp(logp - inputs["logprobs"]), config)
    gradient = -ratio * inputs["advantages"]
    return gradient * logp, gradient


def dro(xp: Xp, logp: XpArray, inputs: Mapping[str, XpArray], config: Mapping[str, XpArray]) -> tuple[XpArray, XpArray]:
    """-(logp * A - beta / 2 * (logp - q)**2) (arXiv 2405.19107, per token)."""
    del xp
    advantages, beta = inputs["advantages"], config["beta"]
    drift = logp - inputs["logprobs"]
    return -(logp * advantages - 0.5 * beta * drift * drift), -(advantages - beta * drift)


def _pessimistic(xp: Xp, ratio: XpArray, advantages: XpArray, config: Mapping[str, XpArray]) -> tuple[XpArray, XpArray]:
    """Return the lesser gain of the ratio and the clipped ratio, negated; its derivative by log ratio."""
    plain = ratio * advantages
    clipped = _clip(xp, ratio, config) * advantages
    gradient = xp.where(plain <= clipped, -plain, 0.0 * plain)
    return -xp.minimum(plain, clipped), gradient


def _clip(xp: Xp, ratio: XpArray, config: Mapping[str, XpArray]) -> XpArray:
    low, high = config["clip_low_threshold"], config["clip_high_threshold"]
    return xp.where(ratio < low, low, xp.where(ratio > high, high, ratio))


_RL_INPUTS = ("logprobs", "advantages")

# Thresholds bound the ratio itself. Defaults follow the public documentation. It names none for dro's beta, so
# the value of its example is used, nor for gspo's thresholds, which are required: its paper's are a thousandth as far
# from 1 as ppo's (docs/reference/protocol.md lists both among the decisions).
BUILTIN_LOSSES = (
    LossSpec(name="cross_entropy", inputs=("weights",), per_token=cross_entropy),
    LossSpec(name="importance_sampling", inputs=_RL_INPUTS, per_token=importance_sampling, scaled_by="advantages"),
    LossSpec(
        name="ppo",
        inputs=_RL_INPUTS,
        per_token=ppo,
        config={"clip_low_threshold": 0.8, "clip_high_threshold": 1.2},
        scaled_by="advantages",
    ),
    LossSpec(
        name="cispo",
        inputs=_RL_INPUTS,
        per_token=cispo,
        config={"clip_low_threshold": 0.0, "clip_high_threshold": 4.0},
        stops_gradients=True,
        scaled_by="advantages",
    ),
    LossSpec(name="dro", inputs=_RL_INPUTS, per_token=dro, config={"beta": 0.05}),
    LossSpec(
        name="gspo",
        inputs=(*_RL_INPUTS, "sequence_ratio_mask"),
        per_token=gspo,
        required_config=("clip_low_threshold", "clip_high_threshold"),
        stops_gradients=True,
        sums=("marked_drift", "num_marked"),
        summands=gspo_summands,
        scaled_by="advantages",
    ),
)
