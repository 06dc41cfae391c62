"""What checkpoints are made of: arrays, JSON, an adapter's settings, and a model's complete state."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal, TypeAlias

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float32]
Array = npt.NDArray[Any]  # any dtype: weights may be bfloat16 in checkpoints of full fine-tuning

Json: TypeAlias = Any
"""An unchecked JSON value."""

CheckpointKind = Literal["training", "sampler", "external"]
StopReason = Literal["stop", "length"]

LORA_ALPHA = 32.0
"""The constant alpha of the Tinker API: W' = W + (alpha / rank) * B @ A, for every rank."""
MAX_ALPHA: Final = 1e6
"""Of adapters from elsewhere, which come with an alpha of their own; the least is 1 / MAX_ALPHA."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraConfig:
    """Which adapter a model trains. `seed` is always set: if the client sends none, the server draws one."""

    rank: int  # 0: no adapter, all weights are trained; the flags are then all set
    seed: int
    alpha: float = LORA_ALPHA
    train_attn: bool = True  # q, k, v and o projections
    train_mlp: bool = True  # gate, up and down projections
    train_unembed: bool = True  # the output head, even if it is tied to the embedding

    @property
    def scale(self) -> float:
        return self.alpha / self.rank if self.rank else 0.0

    @property
    def targets(self) -> tuple[str, ...]:
        """What is trained, by the names that capabilities use."""
        flags = ("attn", self.train_attn), ("mlp", self.train_mlp), ("unembed", self.train_unembed)
        return tuple(name for name, on in flags if on)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelState:
    """A model's complete training state under canonical names, as checkpoints store it (docs/reference/checkpoints.md).

    Adapters: names are PEFT's, `base_model.model.<module path>.lora_A.weight` [rank, in] and `.lora_B.weight`
    [out, rank], with the Hugging Face module paths of the base model. Full fine-tuning (`lora.rank` 0): names and
    shapes as in the base model's safetensors, `<module path>.weight` [out, in]; a tied head is omitted.
    Optimizer and gradient mappings have the same keys. All float32.

    Mappings may be lazy: each tensor is accessed once and not kept, so it may be read or gathered on access. Several
    threads may do so at a time. If they are `tinsmith_checkpoints.huggingface.StoredTensors`, a checkpoint takes over
    the files. A lazy mapping that holds memory has an attribute `nbytes`.
    """

    lora: LoraConfig
    weights: Mapping[str, Array]
    adam_m: Mapping[str, Array] = field(default_factory=dict)  # empty: no optimizer step yet
    adam_v: Mapping[str, Array] = field(default_factory=dict)
    gradients: Mapping[str, Array] = field(default_factory=dict)  # pending; empty if there are none
    step: int = 0  # number of optimizer steps

    @property
    def memory_bytes(self) -> int:
        """Host memory of the state: its arrays, and the `nbytes` that lazy mappings state."""
        return sum(map(host_bytes, (self.weights, self.adam_m, self.adam_v, self.gradients)))

    @property
    def weights_bytes(self) -> int:
        """Host memory of the weights."""
        return host_bytes(self.weights)


def host_bytes(tensors: Mapping[str, Array]) -> int:
    """Return what tensors take of the host's memory; of a lazy mapping, what it says in `nbytes`."""
    if isinstance(tensors, dict):
        return sum(array.nbytes for array in tensors.values())
    return int(getattr(tensors, "nbytes", 0))
