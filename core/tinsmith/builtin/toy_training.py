"""The toy backend's state of a model, and training's two steps on it: accumulate and step.

State is float32 between calls, so that a checkpoint holds all of it; arithmetic is float64.

Array suffixes: T = tokens, K = targets per token, V = vocabulary.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from tinsmith.builtin.toy_model import Adapter, Float64Array, ToyModel, log_softmax, quiet
from tinsmith.divergence import refuses_step
from tinsmith.losses import LossSpec
from tinsmith.operations import AdamParams, Array, Datum, FloatArray, LoraConfig

_CLIP_EPS = 1e-6  # torch.nn.utils.clip_grad_norm_ divides by the norm plus this


@dataclass(slots=True, kw_only=True)
class TrainedModel:
    """All of one model. Arrays are replaced, never written into, so references to old ones stay valid."""

    lora: LoraConfig
    weights: dict[str, FloatArray]
    adam_m: dict[str, FloatArray] = field(default_factory=dict)  # empty: zeros
    adam_v: dict[str, FloatArray] = field(default_factory=dict)
    gradients: dict[str, FloatArray] = field(default_factory=dict)  # empty: none pending
    step: int = 0

    @property
    def adapter(self) -> Adapter:
        return Adapter(weights=self.weights, scale=self.lora.scale)

    @quiet
    def accumulate(self, gradients: Mapping[str, Float64Array]) -> None:
        """Add one datum's gradient: in the order of the log, so that the bits do not depend on batching."""
        self.gradients = {
            name: np.ascontiguousarray(self.gradients.get(name, 0.0) + gradient, np.float32)
            for name, gradient in gradients.items()
        }

    @quiet
    def optim_step(self, adam: AdamParams) -> float:
        """Step as torch.optim.AdamW does unless refused, clear the gradient, and return its norm before clipping."""
        gradients = {name: self.gradients.get(name, np.zeros_like(w)) for name, w in self.weights.items()}
        # by name: the order in which a checkpoint gives the weights back must not show in the last bit
        norm = float(np.sqrt(sum(np.sum(gradients[name].astype(np.float64) ** 2) for name in sorted(gradients))))
        self.gradients = {}
        if refuses_step(norm, adam):
            return norm
        self.step += 1
        clip = min(1.0, adam.grad_clip_norm / (norm + _CLIP_EPS)) if adam.grad_clip_norm > 0 else 1.0
        for name, weight in self.weights.items():
            gradient = gradients[name] * np.float64(clip)
            m = adam.beta1 * self._moment(self.adam_m, name) + (1 - adam.beta1) * gradient
            v = adam.beta2 * self._moment(self.adam_v, name) + (1 - adam.beta2) * gradient**2
            m_hat, v_hat = m / (1 - adam.beta1**self.step), v / (1 - adam.beta2**self.step)
            decayed = weight * np.float64(1 - adam.learning_rate * adam.weight_decay)
            stepped = decayed - adam.learning_rate * m_hat / (np.sqrt(v_hat) + adam.eps)
            self.weights = self.weights | {name: stepped.astype(np.float32)}
            self.adam_m = self.adam_m | {name: m.astype(np.float32)}
            self.adam_v = self.adam_v | {name: v.astype(np.float32)}
        return norm

    def _moment(self, moments: Mapping[str, FloatArray], name: str) -> Float64Array:
        return moments.get(name, np.zeros_like(self.weights[name])).astype(np.float64)


@dataclass(frozen=True, slots=True, kw_only=True)
class Scored:
    """One datum's numbers. `gradients` is empty if none were requested."""

    loss: float
    outputs: Mapping[str, Array]
    gradients: Mapping[str, Float64Array]


@quiet
def score(
    model: ToyModel, adapter: Adapter, datum: Datum, spec: LossSpec, config: Mapping[str, float], *, backward: bool
) -> Scored:
    """Compute logprobs and loss of one datum and, with `backward`, the gradient of the adapter."""
    # 1. The logprob of every target.
    seen = model.forward(datum.tokens_T, adapter)
    logp_TV = log_softmax(seen.logits_TV)
    logp_TK = np.take_along_axis(logp_TV, datum.targets_TK, axis=-1)
    # 2. The loss and its derivative by the logprobs; inputs have the shape of the targets.
    shape = logp_TK.shape
    inputs = {name: datum.loss_inputs[name].reshape(shape).astype(np.float64) for name in spec.inputs}
    loss_TK, dlogp_TK = spec.of_sequence(np, logp_TK, inputs, {**spec.config, **config})
    # 3. d logp_k / d logits = onehot(target_k) - softmax.
    gradients: Mapping[str, Float64Array] = {}
    if backward:
        dlogits_TV = -np.exp(logp_TV) * dlogp_TK.sum(axis=-1, keepdims=True)
        np.add.at(dlogits_TV, (np.arange(shape[0])[:, None], datum.targets_TK), dlogp_TK)
        gradients = model.backward(seen, dlogits_TV, adapter)
    logprobs = logp_TK.reshape(datum.loss_inputs["target_tokens"].shape).astype(np.float32)
    return Scored(loss=float(loss_TK.sum()), outputs={"logprobs": logprobs}, gradients=gradients)
