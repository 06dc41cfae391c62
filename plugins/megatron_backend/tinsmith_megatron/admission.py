"""Capacity: tokens of a micro-batch, models in training, and whether one more model fits.

Counted as `tinsmith megatron-plan` does. No torch.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

from tinsmith_checkpoints.huggingface import DecoderShape
from tinsmith_megatron.config import MegatronConfig
from tinsmith_megatron.memory import Memory, adapter_sizes, on_stage
from tinsmith_megatron.parallel import Layout, Work
from tinsmith_workers import Budget as WorkersBudget

_F32: Final = 4
_RUNTIME: Final = 1 << 30  # of a GPU: CUDA and NCCL; an allowance, not measured
_ITEM: Final = {"float32": 4, "bfloat16": 2}
_LEAST_TOKENS: Final = 1024  # of a micro-batch, however little memory there is
_KEPT: Final = 4  # an adapter, its gradient and two moments
STRICT_SEQUENCES: Final = 8
"""Sequences of one call of the ranks with strict isolation: each has adapters and a gradient of its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget(WorkersBudget):
    """The use of a rank's memory."""

    REMEDY = (
        "divide the model over more ranks (`tinsmith megatron-plan` lists the layouts that fit), set "
        "activation_checkpointing"
    )
    config: MegatronConfig
    layout: Layout
    dtype: str
    on_cpu: bool
    strict: bool
    context_tokens: int = 0
    micro_tokens: int = 0

    def needed(self, ranks: Sequence[int]) -> int:
        """The adapters are in one call."""
        return self.runtime + max(self._on_stage(stage, ranks) for stage in self.layout.fullest_stages)

    def _on_stage(self, stage: int, ranks: Sequence[int]) -> int:
        adapters, part = [rank for rank in ranks if rank], self.layout.part(self.shape, stage)
        base = self._memory(stage, tenants=len(adapters), rank=max(adapters, default=1))
        held = float(sum(sum(adapter_sizes(self.shape, part, rank)) for rank in adapters) * _KEPT * _F32)
        in_call = base.activations + base.buffers
        if self.config.max_lora_rank:
            held += base.weights
        if full := len(ranks) - len(adapters):
            own = self._memory(stage, tenants=1, rank=0)
            held += full * (own.weights + own.moments + own.gradients)
            in_call = max(in_call, own.activations + own.buffers)
        return int(held + in_call)

    def _memory(self, stage: int, *, tenants: int, rank: int) -> Memory:
        """Count for a call of micro-batches of the greatest size."""
        tokens = self.context_tokens if self.strict else self.micro_tokens
        step = self.layout.pp * self.layout.dp * tokens
        work = Work(
            tenants=min(tenants, STRICT_SEQUENCES) if self.strict else tenants,
            rank=rank,
            tokens=tokens,
            context=self.context_tokens,
            step_tokens=step,
            item=_ITEM[self.dtype],
            on_cpu=self.on_cpu,
        )
        return on_stage(self.shape, self.layout, work, stage)

    @property
    def runtime(self) -> int:
        return 0 if self.on_cpu else _RUNTIME

    @property
    def base(self) -> int:
        """The fullest rank's part of the frozen model."""
        if not self.config.max_lora_rank:
            return 0
        return int(max(self._memory(stage, tenants=0, rank=1).weights for stage in self.layout.fullest_stages))

    @property
    def micro_batch(self) -> int:
        """The memory of a call in addition to its adapters."""
        return self.needed([]) - self.base - self.runtime

    @property
    def per_model(self) -> int:
        """The memory of another model of the largest rank; without adapters, of a fully trained one."""
        largest = self.config.max_lora_rank
        return self.needed([largest] * 2) - self.needed([largest])


def budget_of(config: MegatronConfig, shape: DecoderShape, world: int, memory: int | None, *, on_cpu: bool) -> Budget:
    """Choose the token budget: what the settings say, else as usual, or less if memory is short."""
    resolved = config.resolved(on_cpu=on_cpu)
    layout = Layout(
        tp=config.tensor_parallel,
        pp=config.pipeline_parallel,
        ep=config.expert_parallel,
        dp=world // (config.tensor_parallel * config.pipeline_parallel),
        recompute=resolved.checkpointing,
    )
    open_ = Budget(
        config=config,
        shape=shape,
        layout=layout,
        data_parallel=layout.dp,
        dtype=resolved.dtype,
        on_cpu=on_cpu,
        strict=resolved.strict,
        memory=memory,
    )
    found = _with_tokens(open_, resolved.batch_tokens, resolved.longest)
    if config.max_batch_tokens is not None or memory is None:
        return found
    while found.micro_tokens > _LEAST_TOKENS and _is_tight(found):
        smaller = _with_tokens(open_, found.micro_tokens // 2, resolved.longest)
        if smaller.micro_tokens == found.micro_tokens:
            break  # the longest sequence that was asked for
        found = smaller
    return found


def _with_tokens(budget: Budget, tokens: int, longest: int) -> Budget:
    config = budget.config
    context = config.max_context_tokens or min(budget.shape.max_position, longest)
    if budget.memory is not None and config.max_context_tokens is None:
        context = min(context, max(tokens, _LEAST_TOKENS))
    return replace(budget, context_tokens=context, micro_tokens=max(context, tokens))


def _is_tight(budget: Budget) -> bool:
    """Return whether a micro-batch takes more than a third of the memory left beside the base model."""
    assert budget.memory is not None
    return 3 * budget.micro_batch > budget.memory - budget.base - budget.runtime
