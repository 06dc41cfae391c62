"""How many weights a decoder has, by part, and how many an adapter on it has."""

from collections.abc import Sequence
from dataclasses import dataclass

from tinsmith_checkpoints.huggingface.decoder import HEAD, DecoderShape


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightCounts:
    """The weights of a decoder."""

    embedding: int
    layer: int  # of one layer, experts included
    matrices: int  # of those, the ones that may be 8-bit integers: all linear layers but the head
    scales: int  # of these integers; 0 if the model is not quantised
    experts: int  # of those of one layer; 0 for a dense model
    num_layers: int
    norm: int  # the last one
    head: int  # 0 if it is the embedding
    others: int  # that layers unlike the others have beyond `layer`, in all

    @property
    def outside_layers(self) -> int:
        return self.embedding + self.norm + self.head + self.others

    @property
    def total(self) -> int:
        return self.outside_layers + self.num_layers * self.layer

    def layer_bytes(self, item: int) -> int:
        """Return the size of a layer: `item` bytes for a weight, 1 for one that is an integer, 4 for a scale."""
        if not self.scales:
            return self.layer * item
        return self.matrices + 4 * self.scales + (self.layer - self.matrices) * item

    def total_bytes(self, item: int) -> int:
        return self.outside_layers * item + self.num_layers * self.layer_bytes(item)


def weight_counts(shape: DecoderShape) -> WeightCounts:
    """Count the weights of a decoder."""
    linear = shape.linear_shapes()
    experts = _expert_weights(shape)
    plain = [linear[path] for path in shape.plain_modules]
    matrices = sum(inputs * outputs for inputs, outputs in plain) + experts
    return WeightCounts(
        embedding=shape.vocab_size * shape.hidden_size,
        layer=matrices + shape.vector_weights + _router_weights(shape),
        matrices=matrices,
        scales=_scales(shape, plain),
        experts=experts,
        num_layers=shape.num_layers,
        norm=shape.hidden_size,
        head=0 if shape.tied else shape.vocab_size * shape.hidden_size,
        others=shape.other_weights[0],
    )


def _expert_weights(shape: DecoderShape) -> int:
    if shape.experts is None:
        return 0
    matrices = len(shape.mlp_modules) * shape.expert_input * shape.experts.intermediate_size
    return shape.experts.num_experts * matrices


def _router_weights(shape: DecoderShape) -> int:
    """Count those that choose experts, that gate the shared one, and that make latents and hidden states of them."""
    if shape.experts is None:
        return 0
    latents = 2 * (shape.experts.latent_size or 0)
    return shape.hidden_size * (shape.experts.num_experts + shape.experts.shared_gate + latents)


def _scales(shape: DecoderShape, plain: Sequence[tuple[int, int]]) -> int:
    """Count the scales of a layer's matrices; `plain`: (in, out) of those that are not a routed expert's."""
    if shape.int8 is None:
        return 0
    found = sum(outputs * shape.int8.num_scales(inputs) for inputs, outputs in plain)
    if shape.experts is not None:
        hidden, inner = shape.hidden_size, shape.experts.intermediate_size
        each = 2 * inner * shape.int8.num_scales(hidden) + hidden * shape.int8.num_scales(inner)
        found += shape.experts.num_experts * each
    return found


def adapter_weights(shape: DecoderShape, rank: int) -> int:
    """Count the weights of an adapter on everything that can have one: attention, MLP or experts, and the head."""
    linear = shape.linear_shapes()
    layer = sum(sum(linear[path]) for path in shape.plain_modules) + _adapted_experts(shape)
    return rank * (shape.num_layers * layer + shape.other_weights[1] + sum(linear[HEAD]))


def _adapted_experts(shape: DecoderShape) -> int:
    """Count for rank 1: of each matrix, the factor that faces the hidden states is shared by all experts."""
    if shape.experts is None:
        return 0
    matrix = shape.expert_input + shape.experts.num_experts * shape.experts.intermediate_size
    return len(shape.mlp_modules) * matrix
