"""How many weights a decoder has, by part, and how many an adapter on it has. No bytes: those are the backends'."""

from dataclasses import dataclass

from tinsmith.huggingface.decoder import ATTENTION, HEAD, MLP, DecoderShape


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightCounts:
    """The weights of a decoder."""

    embedding: int
    layer: int  # of one layer, experts included
    experts: int  # of those of one layer; 0 for a dense model
    num_layers: int
    norm: int  # the last one
    head: int  # 0 if it is the embedding

    @property
    def outside_layers(self) -> int:
        return self.embedding + self.norm + self.head

    @property
    def total(self) -> int:
        return self.outside_layers + self.num_layers * self.layer


def weight_counts(shape: DecoderShape) -> WeightCounts:
    """Count the weights of a Qwen2, Qwen3, Qwen3-MoE, Llama or Mistral model."""
    linear = shape.linear_shapes()
    attention = sum(inputs * outputs for inputs, outputs in (linear[path] for path in ATTENTION))
    experts = _expert_weights(shape)
    dense = 0 if experts else sum(inputs * outputs for inputs, outputs in (linear[path] for path in MLP))
    router = 0 if shape.experts is None else shape.hidden_size * shape.experts.num_experts
    return WeightCounts(
        embedding=shape.vocab_size * shape.hidden_size,
        layer=attention + _beside_the_matrices(shape) + dense + router + experts,
        experts=experts,
        num_layers=shape.num_layers,
        norm=shape.hidden_size,
        head=0 if shape.tied else shape.vocab_size * shape.hidden_size,
    )


def _expert_weights(shape: DecoderShape) -> int:
    if shape.experts is None:
        return 0
    return shape.experts.num_experts * 3 * shape.hidden_size * shape.experts.intermediate_size


def _beside_the_matrices(shape: DecoderShape) -> int:
    """Count the two norms of a layer, those of queries and keys (Qwen3), and the biases of attention (Qwen2)."""
    own = 0
    if shape.class_name.startswith("Qwen3"):
        own = 2 * shape.head_dim
    elif shape.class_name.startswith("Qwen2"):
        own = shape.q_size + 2 * shape.kv_size
    return 2 * shape.hidden_size + own


def adapter_weights(shape: DecoderShape, rank: int) -> int:
    """Count the weights of an adapter on everything that can have one: attention, MLP or experts, and the head."""
    linear = shape.linear_shapes()
    in_layers = (*ATTENTION, *MLP) if shape.experts is None else ATTENTION
    layer = sum(sum(linear[path]) for path in in_layers) + _adapted_experts(shape)
    return rank * (shape.num_layers * layer + sum(linear[HEAD]))


def _adapted_experts(shape: DecoderShape) -> int:
    """Count for rank 1: of each matrix, the factor that faces the hidden states is shared by all experts."""
    if shape.experts is None:
        return 0
    return 3 * (shape.hidden_size + shape.experts.num_experts * shape.experts.intermediate_size)
