"""An adapter as one flat float32 vector: the places of its weights, their initial values and canonical (PEFT) names.

With one vector per adapter, an optimizer step, a reduction over ranks and a transfer to the host are each one
operation.
The engine's side and the ranks compute the same layout from the same facts. No torch.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from tinsmith import Array, FloatArray, LoraConfig, UserError
from tinsmith.huggingface import ATTENTION, HEAD, MLP, DecoderShape, draw_lora_A, weight_name

_ALIGNMENT = (
    16  # elements: weights are aligned to 64 bytes, for matrix kernels and so that bits do not depend on alignment
)


@dataclass(frozen=True, slots=True)
class Slot:
    """A weight's place in the vector."""

    offset: int
    shape: tuple[int, int]

    @property
    def stop(self) -> int:
        return self.offset + math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class Pair:
    """A [rank, in] and B [out, rank] of one linear module."""

    module: str  # for example model.layers.0.self_attn.q_proj
    kind: str  # its path within a layer, or lm_head
    layer: int  # 0 for the head
    A: Slot
    B: Slot


class AdapterLayout:
    """The places of all weights of an adapter; untrained modules have none."""

    def __init__(self, lora: LoraConfig, architecture: DecoderShape) -> None:
        self.lora = lora
        self.pairs: dict[str, Pair] = {}
        self.size = 0
        shapes = architecture.linear_shapes()
        for module, kind, layer in _modules(lora, architecture.num_layers):
            d_in, d_out = shapes[kind]
            A, B = self._place(lora.rank, d_in), self._place(d_out, lora.rank)
            self.pairs[module] = Pair(module, kind, layer, A, B)

    def _place(self, rows: int, columns: int) -> Slot:
        slot = Slot(self.size, (rows, columns))
        self.size = -(-slot.stop // _ALIGNMENT) * _ALIGNMENT
        return slot

    def slots(self) -> Iterator[tuple[str, Slot]]:
        """Yield canonical names and places, in order."""
        for pair in self.pairs.values():
            yield weight_name(pair.module, "A"), pair.A
            yield weight_name(pair.module, "B"), pair.B

    def fresh(self) -> FloatArray:
        """Make the initial weights: A is drawn, B is zero."""
        flat = np.zeros(self.size, np.float32)
        for pair in self.pairs.values():
            drawn = draw_lora_A(self.lora, pair.kind, pair.layer, pair.A.shape[1])
            flat[pair.A.offset : pair.A.stop] = drawn.ravel()
        return flat

    def to_canonical(self, flat: FloatArray) -> dict[str, Array]:
        """Return the weights by canonical name, as views of `flat`."""
        return {name: flat[slot.offset : slot.stop].reshape(slot.shape) for name, slot in self.slots()}

    def from_canonical(self, named: Mapping[str, Array]) -> FloatArray:
        """Lay out weights in a vector. Raise UserError if one is missing, unknown or of the wrong shape."""
        flat = np.zeros(self.size, np.float32)
        left = set(named)
        for name, slot in self.slots():
            if name not in named:
                msg = f"adapter weight {name!r} is missing"
                raise UserError(msg)
            value = np.asarray(named[name], np.float32)
            if value.shape != slot.shape:
                msg = f"adapter weight {name!r} has shape {value.shape}, this model and LoRA need {slot.shape}"
                raise UserError(msg)
            flat[slot.offset : slot.stop] = value.ravel()
            left.discard(name)
        if left:
            first = min(left)
            msg = f"adapter weights {first!r} and {len(left) - 1} more do not belong to this model and LoRA"
            raise UserError(msg)
        return flat


def _modules(lora: LoraConfig, num_layers: int) -> Iterator[tuple[str, str, int]]:
    kinds = (*(ATTENTION if lora.train_attn else ()), *(MLP if lora.train_mlp else ()))
    for layer in range(num_layers):
        for kind in kinds:
            yield f"model.layers.{layer}.{kind}", kind, layer
    if lora.train_unembed:
        yield HEAD, HEAD, 0
