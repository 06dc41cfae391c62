"""The oracle: every loss and one AdamW step, in float64, token by token and number by number, written to be checked.

It shares no code with `losses.py`: a loss here is a scalar function of two logprobs, the one that is differentiated and
the one that a stop_gradient holds still, and its derivative is taken numerically.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tinsmith.operations import AdamParams, Array, Datum

Float64Array = npt.NDArray[np.float64]

_DIFFERENCE = 1e-5  # nats; the error of a central difference is proportional to its square

# (logp, logp held still, inputs, config) -> loss, all scalars
_ScalarLoss = Callable[[float, float, Mapping[str, float], Mapping[str, float]], float]


def _cross_entropy(logp: float, _: float, inputs: Mapping[str, float], __: Mapping[str, float]) -> float:
    return -inputs["weights"] * logp


def _importance_sampling(logp: float, _: float, inputs: Mapping[str, float], __: Mapping[str, float]) -> float:
    return -math.exp(logp - inputs["logprobs"]) * inputs["advantages"]


def _ppo(logp: float, _: float, inputs: Mapping[str, float], config: Mapping[str, float]) -> float:
    ratio = math.exp(logp - inputs["logprobs"])
    clipped = min(max(ratio, config["clip_low_threshold"]), config["clip_high_threshold"])
    return -min(ratio * inputs["advantages"], clipped * inputs["advantages"])


def _cispo(logp: float, still: float, inputs: Mapping[str, float], config: Mapping[str, float]) -> float:
    ratio = math.exp(still - inputs["logprobs"])
    clipped = min(max(ratio, config["clip_low_threshold"]), config["clip_high_threshold"])
    return -clipped * logp * inputs["advantages"]


def _dro(logp: float, _: float, inputs: Mapping[str, float], config: Mapping[str, float]) -> float:
    drift = logp - inputs["logprobs"]
    return -(logp * inputs["advantages"] - 0.5 * config["beta"] * drift**2)


def _gspo(logp: float, still: float, inputs: Mapping[str, float], config: Mapping[str, float]) -> float:
    ratio = inputs["sequence_ratio"] * math.exp(logp - still)
    clipped = min(max(ratio, config["clip_low_threshold"]), config["clip_high_threshold"])
    return -min(ratio * inputs["advantages"], clipped * inputs["advantages"])


_LOSSES: Mapping[str, _ScalarLoss] = {
    "cross_entropy": _cross_entropy,
    "importance_sampling": _importance_sampling,
    "ppo": _ppo,
    "cispo": _cispo,
    "dro": _dro,
    "gspo": _gspo,
}
_DEFAULTS: Mapping[str, Mapping[str, float]] = {
    "ppo": {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2},
    "cispo": {"clip_low_threshold": 0.0, "clip_high_threshold": 4.0},
    "dro": {"beta": 0.05},
}
LOSS_NAMES = tuple(_LOSSES)
NEEDED_CONFIG: Mapping[str, Mapping[str, float]] = {"gspo": {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}}
"""Values of the settings that a loss needs in loss_fn_config, for suites."""


def losses(
    loss_fn: str, logprobs: Array, loss_inputs: Mapping[str, Array], config: Mapping[str, float]
) -> Float64Array:
    """Return the loss of every token, in the shape of `logprobs`."""
    return _each_token(loss_fn, logprobs, loss_inputs, config, 0.0)


def loss_derivatives(
    loss_fn: str, logprobs: Array, loss_inputs: Mapping[str, Array], config: Mapping[str, float]
) -> Float64Array:
    """Return d loss / d logprob of every token. Meaningless within 1e-5 nats of a clipping threshold."""
    above = _each_token(loss_fn, logprobs, loss_inputs, config, _DIFFERENCE)
    below = _each_token(loss_fn, logprobs, loss_inputs, config, -_DIFFERENCE)
    return (above - below) / (2.0 * _DIFFERENCE)


def loss_sum(
    loss_fn: str, data: Sequence[Datum], logprobs: Sequence[Array], config: Mapping[str, float] | None = None
) -> float:
    """Return the `loss:sum` that follows from these logprobs of the data's targets."""
    return math.fsum(
        float(losses(loss_fn, logp, datum.loss_inputs, config or {}).sum())
        for datum, logp in zip(data, logprobs, strict=True)
    )


def _each_token(
    loss_fn: str, logprobs: Array, loss_inputs: Mapping[str, Array], config: Mapping[str, float], moved: float
) -> Float64Array:
    scalar, settings = _LOSSES[loss_fn], {**_DEFAULTS.get(loss_fn, {}), **config}
    result = np.empty(logprobs.shape)
    whole = {"sequence_ratio": _sequence_ratio(logprobs, loss_inputs)} if loss_fn == "gspo" else {}
    for index, value in np.ndenumerate(logprobs):
        inputs = {name: float(array[index]) for name, array in loss_inputs.items() if name != "target_tokens"}
        result[index] = scalar(float(value) + moved, float(value), inputs | whole, settings)
    return result


def _sequence_ratio(logprobs: Array, loss_inputs: Mapping[str, Array]) -> float:
    """Return the geometric mean of the ratios of the tokens that are marked; 1 if none is."""
    marked = loss_inputs["sequence_ratio_mask"] != 0
    drifts = logprobs[marked].astype(np.float64) - loss_inputs["logprobs"][marked]
    return math.exp(math.fsum(drifts) / max(1, len(drifts)))


@dataclass(frozen=True, slots=True, kw_only=True)
class AdamState:
    weights: Mapping[str, Float64Array]
    m: Mapping[str, Float64Array]
    v: Mapping[str, Float64Array]
    step: int
    grad_norm: float = 0.0  # of the last step, before clipping


def adamw_step(state: AdamState, gradients: Mapping[str, Array], adam: AdamParams) -> AdamState:
    """Step once: clip by the global norm, decay, update the moments, move (arXiv 1711.05101, as torch.optim.AdamW)."""
    step = state.step + 1
    squares = [float(x) ** 2 for gradient in gradients.values() for x in gradient.ravel()]
    norm = math.sqrt(math.fsum(squares))
    clip = min(1.0, adam.grad_clip_norm / (norm + 1e-6)) if adam.grad_clip_norm > 0.0 else 1.0
    weights, m, v = {}, {}, {}
    for name, weight in state.weights.items():
        gradient = gradients[name].astype(np.float64) * clip
        m[name] = state.m[name] + (1.0 - adam.beta1) * (gradient - state.m[name])
        v[name] = state.v[name] + (1.0 - adam.beta2) * (gradient * gradient - state.v[name])
        denominator = np.sqrt(v[name]) / math.sqrt(1.0 - adam.beta2**step) + adam.eps
        decayed = weight - adam.learning_rate * adam.weight_decay * weight
        weights[name] = decayed - adam.learning_rate / (1.0 - adam.beta1**step) * m[name] / denominator
    return AdamState(weights=weights, m=m, v=v, step=step, grad_norm=norm)
