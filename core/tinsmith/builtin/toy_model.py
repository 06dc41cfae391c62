"""The toy language model: small enough to differentiate by hand, with a memory, so that contexts matter.

    x = embedding[token]        q = q_proj(x)        h_t = 0.8 * h_(t-1) + q_t
    u = tanh(up_proj(h))        logits = lm_head(h + u)

The three projections carry LoRA deltas under the names that PEFT would give them; in full fine-tuning the weights have
the names of a Hugging Face model. Everything is computed in float64.

Array suffixes: T = tokens, H = hidden size, V = vocabulary.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tinsmith.operations import Array, FloatArray, LoraConfig, TokenArray

Float64Array = npt.NDArray[np.float64]

_Q_PROJ = "base_model.model.model.layers.0.self_attn.q_proj"
_UP_PROJ = "base_model.model.model.layers.0.mlp.up_proj"
_LM_HEAD = "base_model.model.lm_head"
_EMBEDDING = "model.embed_tokens.weight"
_MEMORY = 0.8

# Weights that have become infinite or NaN are their owner's business: they give NaN, and neither warn nor raise.
quiet = np.errstate(all="ignore")


@dataclass(frozen=True, slots=True, kw_only=True)
class Adapter:
    """A model's weights for a forward pass: LoRA weights by canonical name, and alpha / rank; or all weights."""

    weights: Mapping[str, Array]
    scale: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Activations:
    """What `backward` needs of `forward`; the last row of `memory_TH` is where the next token goes on."""

    tokens_T: TokenArray
    embedded_TH: Float64Array
    memory_TH: Float64Array
    hidden_TH: Float64Array
    logits_TV: Float64Array


class ToyModel:
    """The frozen base weights and the maths. Knows no models, requests or optimizers."""

    def __init__(self, *, vocab_size: int, hidden_size: int, seed: int) -> None:
        rng = np.random.default_rng(seed)
        self._embedding_VH = rng.normal(size=(vocab_size, hidden_size))
        bound = hidden_size**-0.5
        self.base = {  # [out, in], as torch.nn.Linear keeps them
            _Q_PROJ: rng.normal(size=(hidden_size, hidden_size)) * bound,
            _UP_PROJ: rng.normal(size=(hidden_size, hidden_size)) * bound,
            _LM_HEAD: rng.normal(size=(vocab_size, hidden_size)) * bound,
        }

    def init_lora(self, lora: LoraConfig) -> dict[str, FloatArray]:
        """Draw A from the seed, uniform within 1 / sqrt(in); B is zero. Only the modules that the flags name.

        At rank 0 return all weights of the base model.
        """
        if lora.rank == 0:
            every = {_EMBEDDING: self._embedding_VH} | {full_name(module): base for module, base in self.base.items()}
            return {name: weight.astype(np.float32) for name, weight in every.items()}
        trained = {_Q_PROJ: lora.train_attn, _UP_PROJ: lora.train_mlp, _LM_HEAD: lora.train_unembed}
        weights: dict[str, FloatArray] = {}
        for index, (module, base) in enumerate(self.base.items()):
            if trained[module]:
                rng = np.random.default_rng([lora.seed % 2**64, index])  # a module's draw is independent of the flags
                bound = base.shape[1] ** -0.5
                weights[_a(module)] = rng.uniform(-bound, bound, (lora.rank, base.shape[1])).astype(np.float32)
                weights[_b(module)] = np.zeros((base.shape[0], lora.rank), np.float32)
        return weights

    @quiet
    def forward(self, tokens_T: TokenArray, adapter: Adapter, memory_H: Float64Array | None = None) -> Activations:
        """Run the tokens of one sequence, from the start or from the memory that an earlier call left."""
        embedded_TH = np.asarray(adapter.weights.get(_EMBEDDING, self._embedding_VH), np.float64)[tokens_T]
        memory_TH = self._linear(_Q_PROJ, embedded_TH, adapter)
        carried_H = np.zeros(memory_TH.shape[1]) if memory_H is None else memory_H
        for row_H in memory_TH:
            row_H += _MEMORY * carried_H  # noqa: PLW2901 - rows are views: this writes into memory_TH
            carried_H = row_H
        hidden_TH = np.tanh(self._linear(_UP_PROJ, memory_TH, adapter))
        logits_TV = self._linear(_LM_HEAD, memory_TH + hidden_TH, adapter)
        return Activations(
            tokens_T=tokens_T, embedded_TH=embedded_TH, memory_TH=memory_TH, hidden_TH=hidden_TH, logits_TV=logits_TV
        )

    def backward(self, seen: Activations, dlogits_TV: Float64Array, adapter: Adapter) -> dict[str, Float64Array]:
        """Return the gradient of every adapter weight, given the gradient of the logits."""
        gradients: dict[str, Float64Array] = {}
        summed_TH = seen.memory_TH + seen.hidden_TH
        dsummed_TH = self._linear_backward(_LM_HEAD, summed_TH, dlogits_TV, adapter, gradients)
        dhidden_TH = dsummed_TH * (1.0 - seen.hidden_TH**2)
        dmemory_TH = dsummed_TH + self._linear_backward(_UP_PROJ, seen.memory_TH, dhidden_TH, adapter, gradients)
        for t in range(len(dmemory_TH) - 1, 0, -1):
            dmemory_TH[t - 1] += _MEMORY * dmemory_TH[t]
        dembedded_TH = self._linear_backward(_Q_PROJ, seen.embedded_TH, dmemory_TH, adapter, gradients)
        if _EMBEDDING in adapter.weights:
            gradients[_EMBEDDING] = np.zeros_like(self._embedding_VH)
            np.add.at(gradients[_EMBEDDING], seen.tokens_T, dembedded_TH)
        return gradients

    def _matrix(self, module: str, adapter: Adapter) -> Float64Array:
        return np.asarray(adapter.weights.get(full_name(module), self.base[module]), np.float64)

    def _linear(self, module: str, x: Float64Array, adapter: Adapter) -> Float64Array:
        y: Float64Array = x @ self._matrix(module, adapter).T
        if _a(module) in adapter.weights:
            a, b = adapter.weights[_a(module)], adapter.weights[_b(module)]
            y += adapter.scale * (x @ a.T) @ b.T
        return y

    def _linear_backward(
        self, module: str, x: Float64Array, dy: Float64Array, adapter: Adapter, gradients: dict[str, Float64Array]
    ) -> Float64Array:
        """Add the module's gradients to `gradients` and return its input's."""
        dx: Float64Array = dy @ self._matrix(module, adapter)
        if full_name(module) in adapter.weights:
            gradients[full_name(module)] = dy.T @ x
        if _a(module) in adapter.weights:
            a, b = adapter.weights[_a(module)], adapter.weights[_b(module)]
            dlow = adapter.scale * dy @ b
            gradients[_a(module)] = dlow.T @ x
            gradients[_b(module)] = adapter.scale * dy.T @ (x @ a.T)
            dx += dlow @ a
        return dx


@quiet
def log_softmax(logits: Float64Array) -> Float64Array:
    """Over the last axis."""
    shifted = logits - logits.max(axis=-1, keepdims=True)
    result: Float64Array = shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))
    return result


def _a(module: str) -> str:
    return f"{module}.lora_A.weight"


def _b(module: str) -> str:
    return f"{module}.lora_B.weight"


def full_name(module: str) -> str:
    """Name the matrix itself, as the model's own files do."""
    return f"{module.removeprefix('base_model.model.')}.weight"
