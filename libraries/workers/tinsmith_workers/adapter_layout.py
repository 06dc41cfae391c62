"""A part of an adapter as one flat float32 vector: the places of its weights, initial values and canonical names.

With one vector, an optimizer step, a reduction over workers and a transfer to the host are each one operation.
The engine's side and the workers compute the same layout from the same facts.

The vector has two regions: what all workers of a pipeline stage hold, and then what belongs to this part's experts.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from tinsmith.errors import UserError
from tinsmith.operations import Array, FloatArray, LoraConfig
from tinsmith_checkpoints.huggingface.decoder import EXPERTS, HEAD, DecoderShape
from tinsmith_checkpoints.huggingface.peft_layout import draw_lora_A, weight_name

_ALIGNMENT = 16  # elements: weights start at 64 bytes, for matrix kernels and so that bits do not depend on alignment
_DOWN = EXPERTS[2]


@dataclass(frozen=True, slots=True)
class ModelPart:
    """A pipeline stage and a share of its experts: workers of the same part hold the same adapter weights."""

    layers: range
    experts: range  # empty if the model has none
    has_head: bool
    stage: int
    is_first_of_stage: bool  # it alone reports what all shares of a stage hold


def whole_model(shape: DecoderShape) -> ModelPart:
    """Return the part of a worker that holds every adapter whole."""
    experts = 0 if shape.experts is None else shape.experts.num_experts
    return ModelPart(range(shape.num_layers), range(experts), has_head=True, stage=0, is_first_of_stage=True)


def holders(parts: Sequence[ModelPart]) -> dict[ModelPart, int]:
    """Return each part once, with the first worker that holds it. `parts`: each worker's, by rank."""
    found: dict[ModelPart, int] = {}
    for rank, part in enumerate(parts):
        found.setdefault(part, rank)
    return found


@dataclass(frozen=True, slots=True)
class Slot:
    """A weight's place in the vector. `of_experts`: its first axis is this part's experts."""

    offset: int
    shape: tuple[int, ...]
    of_experts: bool = False

    @property
    def stop(self) -> int:
        return self.offset + math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class Pair:
    """A [rank, in] and B [out, rank] of one linear module, or of all experts of a layer with an axis before these."""

    module: str  # for example model.layers.0.self_attn.q_proj
    kind: str  # its path within a layer, or lm_head
    layer: int  # 0 for the head
    A: Slot
    B: Slot


class AdapterLayout:
    """The places of all weights of an adapter's part; untrained modules have none.

    `period`: after how many layers the modules repeat.
    """

    def __init__(self, lora: LoraConfig, shape: DecoderShape, part: ModelPart | None = None) -> None:
        """`part` None: the whole model."""
        self.lora = lora
        self.part = whole_model(shape) if part is None else part
        self.period = shape.period
        shapes = list(_modules(lora, shape, self.part))
        self._size = 0
        placed = [
            Pair(module, kind, layer, *(self._place(slot, of_experts=False) for slot in slots))
            for module, kind, layer, slots in shapes
        ]
        self.shared_size = self._size  # the first region
        placed = [
            replace(pair, A=self._place(pair.A, of_experts=True), B=self._place(pair.B, of_experts=True))
            for pair in placed
        ]
        self.pairs = {pair.module: pair for pair in placed}
        self.size = self._size
        self.places = dict(self._slots())

    def _place(self, slot: Slot, *, of_experts: bool) -> Slot:
        """Place the slot if its region has come."""
        if slot.of_experts is not of_experts:
            return slot
        placed = replace(slot, offset=self._size)
        self._size = -(-placed.stop // _ALIGNMENT) * _ALIGNMENT
        return placed

    def _slots(self) -> Iterator[tuple[str, Slot]]:
        """Yield canonical names and places, in order."""
        for pair in self.pairs.values():
            yield weight_name(pair.module, "A"), pair.A
            yield weight_name(pair.module, "B"), pair.B

    def fresh(self) -> FloatArray:
        """Make the initial weights: A is drawn, B is zero."""
        flat = np.zeros(self.size, np.float32)
        for pair in self.pairs.values():
            flat[pair.A.offset : pair.A.stop] = self._drawn(pair).ravel()
        return flat

    def _drawn(self, pair: Pair) -> FloatArray:
        d_in = pair.A.shape[-1]
        if not pair.A.of_experts:
            return draw_lora_A(self.lora, pair.kind, pair.layer, d_in)
        return np.stack(
            [draw_lora_A(self.lora, pair.kind, pair.layer, d_in, expert=expert) for expert in self.part.experts]
        )

    def named(self, flat: FloatArray) -> dict[str, Array]:
        """Return this part's weights by canonical name, as views of `flat`."""
        return {name: flat[slot.offset : slot.stop].reshape(slot.shape) for name, slot in self.places.items()}


class WholeLayout:
    """The layouts of all parts of an adapter, and the way between them and canonical weights."""

    def __init__(self, lora: LoraConfig, shape: DecoderShape, parts: Sequence[ModelPart]) -> None:
        self.lora = lora
        self.parts = [AdapterLayout(lora, shape, part) for part in parts]
        self._shapes = {name: s for layout in self.parts for name, s in _whole_shapes(layout, shape)}

    def to_canonical(self, flats: Sequence[FloatArray]) -> dict[str, Array]:
        """Return the weights of all parts by canonical name. Experts that lie on several parts are put together."""
        found: dict[str, list[Array]] = {name: [] for name in self._shapes}
        for layout, flat in zip(self.parts, flats, strict=True):
            for name, value in layout.named(flat).items():
                if layout.places[name].of_experts or layout.part.is_first_of_stage:
                    found[name].append(value)
        return {name: pieces[0] if len(pieces) == 1 else np.concatenate(pieces) for name, pieces in found.items()}

    def from_canonical(self, named: Mapping[str, Array]) -> list[FloatArray]:
        """Lay out weights in the parts' vectors. Raise UserError if one is missing, unknown or of the wrong shape."""
        flats = [np.zeros(layout.size, np.float32) for layout in self.parts]
        for name, shape in self._shapes.items():
            if name not in named:
                msg = f"adapter weight {name!r} is missing"
                raise UserError(msg)
            value = np.asarray(named[name], np.float32)
            if value.shape != shape:
                msg = f"adapter weight {name!r} has shape {value.shape}, this model and LoRA need {shape}"
                raise UserError(msg)
            for layout, flat in zip(self.parts, flats, strict=True):
                _put(layout, flat, name, value)
        if left := set(named) - set(self._shapes):
            msg = f"adapter weights {min(left)!r} and {len(left) - 1} more do not belong to this model and LoRA"
            raise UserError(msg)
        return flats


def _put(layout: AdapterLayout, flat: FloatArray, name: str, value: Array) -> None:
    slot = layout.places.get(name)
    if slot is not None:
        own = value[layout.part.experts.start : layout.part.experts.stop] if slot.of_experts else value
        flat[slot.offset : slot.stop] = own.ravel()


def _whole_shapes(layout: AdapterLayout, shape: DecoderShape) -> Iterator[tuple[str, tuple[int, ...]]]:
    for name, slot in layout.places.items():
        experts = 0 if shape.experts is None else shape.experts.num_experts
        yield name, (experts, *slot.shape[1:]) if slot.of_experts else slot.shape


def _modules(
    lora: LoraConfig, shape: DecoderShape, part: ModelPart
) -> Iterator[tuple[str, str, int, tuple[Slot, Slot]]]:
    """Yield module, kind, layer, and the slots of A and B, which have no offsets yet."""
    shapes, rank = shape.linear_shapes(), lora.rank
    for layer in part.layers:
        mlp = shape.feed_forward_modules(layer) if lora.train_mlp else ()
        for kind in (*(shape.mixer_modules(layer) if lora.train_attn else ()), *mlp):
            yield f"model.layers.{layer}.{kind}", kind, layer, _plain(rank, *shapes[kind])
        if shape.experts is not None and shape.has_experts(layer) and lora.train_mlp:
            inner = shape.experts.intermediate_size
            for kind in EXPERTS:
                slots = _expert_slots(kind, rank, shape.hidden_size, inner, len(part.experts))
                yield f"model.layers.{layer}.{kind}", kind, layer, slots
    if lora.train_unembed and part.has_head:
        yield HEAD, HEAD, 0, _plain(rank, *shapes[HEAD])


def _plain(rank: int, d_in: int, d_out: int) -> tuple[Slot, Slot]:
    return Slot(0, (rank, d_in)), Slot(0, (d_out, rank))


def _expert_slots(kind: str, rank: int, hidden: int, inner: int, experts: int) -> tuple[Slot, Slot]:
    """The side that faces the hidden states is shared by all experts (protocol.md, LoRA)."""
    if kind == _DOWN:
        return Slot(0, (experts, rank, inner), of_experts=True), Slot(0, (1, hidden, rank))
    return Slot(0, (1, rank, hidden)), Slot(0, (experts, inner, rank), of_experts=True)
