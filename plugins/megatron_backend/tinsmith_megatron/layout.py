"""A layout of the ranks, and the work of a step."""

from dataclasses import dataclass

from tinsmith_checkpoints.huggingface import DecoderShape
from tinsmith_megatron.config import MegatronConfig
from tinsmith_megatron.parallel import Coordinates, part_of
from tinsmith_workers import ModelPart


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
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
