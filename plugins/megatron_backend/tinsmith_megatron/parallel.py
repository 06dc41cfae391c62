"""How the ranks divide the model and the work of a step, and which divisions a model and a number of ranks allow.

No torch.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from tinsmith import ConfigError
from tinsmith_checkpoints.huggingface import DecoderShape, HybridShape
from tinsmith_megatron.config import MegatronConfig
from tinsmith_workers import ModelPart


@dataclass(frozen=True, slots=True, kw_only=True)
class Coordinates:
    """A rank's number in each of Megatron's groups: they decide what it holds and computes."""

    tp_rank: int
    pp_rank: int
    ep_rank: int
    dp_rank: int


def smallest_group(config: MegatronConfig) -> int:
    """Return the fewest ranks that the settings need."""
    return config.pipeline_parallel * math.lcm(config.tensor_parallel, config.expert_parallel)


def check_model(config: MegatronConfig, shape: DecoderShape) -> None:
    """Raise ConfigError, with the values that would do, if the model cannot be divided as configured."""
    for setting, facts in _divided(shape).items():
        value = getattr(config, setting)
        for fact, size in facts:
            if size % value:
                msg = f"{fact} of the model ({size}) must be a multiple of {setting} ({value}); {_would_do(facts)}"
                raise ConfigError(msg)
    if config.expert_parallel > 1 and shape.experts is None:
        msg = f"expert_parallel is {config.expert_parallel}, and {shape.class_name} has no experts: leave it out"
        raise ConfigError(msg)


def _divided(shape: DecoderShape) -> dict[str, list[tuple[str, int]]]:
    heads = [("num_attention_heads", shape.num_heads), ("num_key_value_heads", shape.num_kv_heads)]
    tensor = [*heads, ("vocab_size", shape.vocab_size)]
    if isinstance(shape, HybridShape):
        rule = shape.delta
        tensor += [("linear_num_key_heads", rule.key_heads), ("linear_num_value_heads", rule.value_heads)]
    if not shape.has_experts(0):
        tensor.append(("intermediate_size", shape.intermediate_size))
    if shape.experts is not None and shape.experts.shared_size:
        tensor.append(("the shared experts' intermediate size", shape.experts.shared_size))
    expert = [] if shape.experts is None else [("num_experts", shape.experts.num_experts)]
    return {
        "tensor_parallel": tensor,
        "pipeline_parallel": [("num_hidden_layers", shape.num_layers)],
        "expert_parallel": expert,
    }


def _would_do(facts: Sequence[tuple[str, int]]) -> str:
    common = math.gcd(*(size for _, size in facts))
    return f"possible are {', '.join(str(n) for n in range(1, common + 1) if common % n == 0)}"


def check_ranks(config: MegatronConfig, num_ranks: int) -> None:
    """Raise ConfigError if this number of ranks cannot be grouped as configured."""
    group = smallest_group(config)
    if num_ranks % group:
        settings = (
            f"pipeline_parallel ({config.pipeline_parallel}) * the least common multiple of tensor_parallel "
            f"({config.tensor_parallel}) and expert_parallel ({config.expert_parallel})"
        )
        msg = f"the number of ranks ({num_ranks}) must be a multiple of {settings}: {group}, {2 * group}, ..."
        raise ConfigError(msg)


def part_of(coordinates: Coordinates, config: MegatronConfig, shape: DecoderShape) -> ModelPart:
    """Return the part that a rank holds."""
    per_stage = shape.num_layers // config.pipeline_parallel
    share = 0 if shape.experts is None else shape.experts.num_experts // config.expert_parallel
    return ModelPart(
        layers=range(coordinates.pp_rank * per_stage, (coordinates.pp_rank + 1) * per_stage),
        experts=range(coordinates.ep_rank * share, (coordinates.ep_rank + 1) * share),
        has_head=coordinates.pp_rank == config.pipeline_parallel - 1,
        stage=coordinates.pp_rank,
        is_first_of_stage=coordinates.ep_rank == 0,
    )


def expert_layers(shape: DecoderShape, layers: range) -> range:
    """Return which of the layers with experts lie among these layers."""
    before, within = (sum(map(shape.has_experts, each)) for each in (range(layers.start), layers))
    return range(before, before + within)


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """A division of a model that may not run anywhere."""

    tp: int
    pp: int
    ep: int
    dp: int  # copies of the model's pipeline
    recompute: bool

    @property
    def gpus(self) -> int:
        return self.tp * self.pp * self.dp

    @property
    def expert_copies(self) -> int:
        """Return how many ranks hold the same experts."""
        return self.tp * self.dp // self.ep

    @property
    def fullest_stages(self) -> set[int]:
        """Return the stages among which is the one that needs most. The first may have layers without experts."""
        return {0, min(1, self.pp - 1), self.pp - 1}

    def config(self) -> MegatronConfig:
        return MegatronConfig(tensor_parallel=self.tp, pipeline_parallel=self.pp, expert_parallel=self.ep)

    def part(self, shape: DecoderShape, stage: int) -> ModelPart:
        """Return the first share of a stage."""
        return part_of(Coordinates(tp_rank=0, pp_rank=stage, ep_rank=0, dp_rank=0), self.config(), shape)


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """The trained tensors, and the share of them trained at a time."""

    tenants: int = 8
    rank: int = 32  # of each adapter; 0: all weights of one model are trained
    tokens: int = 16384  # of a micro-batch of one rank
    context: int = 8192  # of the longest sequence
    step_tokens: int = 1 << 20  # of a step, over all ranks
    item: int = 2  # bytes of a weight and of an activation
    on_cpu: bool = False  # attention keeps one copy more, and the head has smaller chunks

    @property
    def full(self) -> bool:
        return self.rank == 0

    def micro_batches(self, layout: Layout) -> int:
        return -(-self.step_tokens // (layout.dp * self.tokens))

    def micro_tokens(self, layout: Layout) -> float:
        """Return the tokens of one micro-batch, if a step's are dealt out evenly."""
        return self.step_tokens / (layout.dp * self.micro_batches(layout))
