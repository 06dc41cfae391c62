"""Capacity: tokens of a micro-batch, slots of the sampler, models in training, and one more of them. No jax."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final

from tinsmith import ConfigError, LoraConfig, OutOfMemoryError
from tinsmith_jax.config import JaxConfig
from tinsmith_jax.costs import Computing, Costs
from tinsmith_jax.model_config import ModelConfig
from tinsmith_jax.rank_classes import class_of
from tinsmith_jax.tiles import MAX_ADAPTERS

FEWEST_TARGETS: Final = 64  # per token, even if fewer alternatives are sampled
_GIB: Final = 2**30
_SHORT: Final = 1024  # tokens that a sequence may have, however little memory there is
_SMALLEST: Final = 128  # tokens of a micro-batch
_SMALL_PASS: Final = 1 << 28  # bytes that a pass on a CPU may keep for its backward pass, however small the model
_FEWEST_TOGETHER: Final = 256  # tokens of a pass on a CPU: with fewer, reading the weights begins to count
_PASS_SHARE: Final = 2  # default share of the memory beside the weights for a micro-batch of eight adapters
_SAMPLER_SHARE: Final = 4  # the part that pages and rows of adapters may take, if models train beside them
_GATHERED_SHARE: Final = 4  # the part of a device's memory that gathered weights may take unasked


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """The use of a device's memory. `memory` None: it is not known, so nothing is refused because of it."""

    config: JaxConfig
    costs: Costs
    memory: int | None
    trains: bool
    samples: bool
    context_tokens: int
    micro_tokens: int  # of a stream
    slots: int  # of each shard

    @property
    def model(self) -> int:
        """The memory of a model of the largest rank."""
        return self._model(self.config.max_lora_rank)

    @property
    def drawn(self) -> int:
        """The sequences that a shard draws at a time.

        For the kernels in C++, a row costs what it costs alone, so an idle one costs nothing: unless the number is set,
        there are twice as many as usual for the memory of `slots`, of those that are short enough.
        """
        is_open = "decode_slots" not in self.config.model_fields_set
        return 2 * self.config.decode_slots if self.costs.computing.native and is_open else self.slots

    @property
    def sampler(self) -> int:
        """The memory for sampling: pages, and rows of adapters."""
        return self.costs.pages(self.slots, self.context_tokens) + self.costs.rows(self.slots) if self.samples else 0

    @property
    def resident(self) -> int:
        """The memory in use between calls, without any model."""
        zeros = self.costs.zeros if self.trains else 0
        return self.costs.base + self.costs.runtime + zeros + self.sampler

    @property
    def together_tokens(self) -> int:
        """The tokens of a stream that train in one pass, unless a single sequence has more.

        On a CPU, a pass of a few hundred tokens multiplies as fast as one of thousands. So one keeps, for its backward
        pass, at most half as much as the weights take, or what the smallest passes do.
        """
        if not self.costs.computing.on_cpu:
            return self.micro_tokens
        room = max(_SMALL_PASS, self.costs.base // 2)
        fitting = (tokens for tokens in _halves(self.micro_tokens) if self.costs.kept(tokens) <= room)
        return max(next(fitting, 0), min(_FEWEST_TOGETHER, self.micro_tokens))

    def working(self, models: int) -> int:
        """Return what the largest program takes: trainer and sampler take turns."""
        return max(self._programs(models))

    def needed(self, models: int) -> int:
        """Return the memory in which this many models of the largest rank can train."""
        return self.resident + models * self.model + self.working(models)

    @property
    def max_models(self) -> int:
        """As many models of the largest rank as fit, and as the settings allow."""
        most, memory = self.config.max_models, self.memory
        if memory is None:
            return most
        return next((models for models in range(most, 0, -1) if self.needed(models) <= memory), 0)

    @property
    def max_snapshots(self) -> int | None:
        """As many of the largest rank as fit beside `max_models` models, in addition to one being loaded."""
        if self.memory is None:
            return None
        models = self.max_models
        own = models * self.costs.model(self.config.max_lora_rank) if self.trains else 0
        left = self.memory - self.resident - self.working(models) - own
        return max(1, left // self.costs.weights(self.config.max_lora_rank) - 1)

    def check(self, lora: LoraConfig, others: Sequence[LoraConfig]) -> None:
        """Raise OutOfMemoryError if such a model does not fit beside these, and UserError if its rank is not served."""
        need, held = self._model(lora.rank), sum(self._model(each.rank) for each in others)
        working = self.working(len(others) + 1)
        if self.memory is None or self.resident + working + held + need <= self.memory:
            return
        msg = (
            f"no memory left for a model of LoRA rank {lora.rank}: on each device it takes {need / _GIB:.3f} GiB "
            f"(weights, gradients, moments, a snapshot); of {self.memory / _GIB:.3f} GiB the base model, the sampler "
            f"and a micro-batch of {self.micro_tokens} tokens take {(self.resident + working) / _GIB:.3f}, other "
            f"models {held / _GIB:.3f}; end a session that has a model, or ask for a smaller rank"
        )
        raise OutOfMemoryError(msg)

    def _model(self, rank: int) -> int:
        """Count a published snapshot as well: the weights as they were before a step."""
        padded = class_of(rank, self.config.max_lora_rank)
        return self.costs.model(padded) + self.costs.weights(padded)

    def _programs(self, models: int) -> Iterator[int]:
        if self.trains:
            adapters = MAX_ADAPTERS if models > 1 or self.costs.computing.on_cpu else 1
            if self.costs.computing.native:
                adapters = min(models, MAX_ADAPTERS)
            yield self.costs.micro_batch(self.micro_tokens, adapters, targets_of(self.config))
            yield self.costs.step(min(models, MAX_ADAPTERS))
        if self.samples:
            yield self.costs.sampling(self.drawn, gathers_once=self.gathers_once)

    @property
    def gathers_once(self) -> bool:
        """True if a decoding dispatch gathers all weights at its start."""
        computing = self.costs.computing
        if computing.fsdp == 1 or self.config.gather_once is not None:
            return computing.fsdp > 1 and bool(self.config.gather_once)
        return self.memory is not None and self.costs.base * computing.fsdp <= self.memory // _GATHERED_SHARE


def computing_of(config: JaxConfig, *, on_cpu: bool) -> Computing:
    """Resolve the settings that the device decides."""
    mesh = {} if config.mesh is None else config.mesh.model_dump()
    return Computing(
        on_cpu=on_cpu,
        dtype=config.dtype or ("float32" if on_cpu else "bfloat16"),
        recompute=not on_cpu if config.recompute is None else config.recompute,
        **mesh,
    )


def targets_of(config: JaxConfig) -> int:
    """Return the most targets per token of training: sampled alternatives can be trained on."""
    return max(FEWEST_TARGETS, config.max_topk_logprobs)


def budget_of(
    config: JaxConfig,
    shape: ModelConfig,
    computing: Computing,
    memory: int | None,
    *,
    trains: bool = True,
    samples: bool = True,
) -> Budget:
    """Choose what the settings leave open: as usual, or if memory is short, the largest sizes that leave room."""
    costs = Costs(shape=shape, computing=computing, max_lora_rank=config.max_lora_rank)
    usual = _Usual(config, shape, computing)

    def made(tokens: int, slots: int) -> Budget:
        return Budget(
            config=config,
            costs=costs,
            memory=memory,
            trains=trains,
            samples=samples,
            context_tokens=usual.context(tokens),
            micro_tokens=tokens,
            slots=slots,
        )

    if memory is None:
        return made(usual.tokens[0], config.decode_slots)
    found = made(usual.tokens[0], 1)
    for tokens in usual.tokens:
        found = made(tokens, 1)
        spare = memory - found.resident - (found.model if trains else 0)
        if found.working(2) <= (spare // _PASS_SHARE if trains else spare):
            break
    return replace(found, slots=_slots(found))


def _slots(least: Budget) -> int:
    """Return the slots of each shard: as many as are set, or as usual if there is room, given the budget with one."""
    most, memory = least.config.decode_slots, least.memory
    if "decode_slots" in least.config.model_fields_set or not least.samples or memory is None:
        return most
    models = 1 if least.trains else 0
    spare = memory - least.resident + least.sampler - models * least.model
    room = spare // _SAMPLER_SHARE if least.trains else spare - spare // _SAMPLER_SHARE
    more = (replace(least, slots=slots) for slots in range(most, 1, -1))
    return next((each.slots for each in more if each.sampler <= room and each.needed(models) <= memory), 1)


class _Usual:
    """The sizes to try, the usual ones first."""

    def __init__(self, config: JaxConfig, shape: ModelConfig, computing: Computing) -> None:
        longest, usual = (2048, 2048) if computing.on_cpu else (8192, 16_384)
        self._given = config.max_context_tokens
        self._longest = min(shape.max_position, longest)
        most = _power(max(self.context(longest), config.max_batch_tokens or usual))
        short = config.max_context_tokens or min(shape.max_position, _SHORT)
        least = min(most, _power(max(short, config.max_batch_tokens or 0)))
        self.tokens = [tokens for tokens in _halves(most) if tokens >= least]

    def context(self, tokens: int) -> int:
        """Return the tokens of the longest sequence, given the tokens of a micro-batch."""
        return self._given or min(self._longest, tokens)


def _halves(tokens: int) -> list[int]:
    """Return a power of two, and the smaller ones down to the smallest micro-batch."""
    return [tokens >> i for i in range((tokens // _SMALLEST).bit_length())]


def _power(tokens: int) -> int:
    return 1 << max(_SMALLEST.bit_length() - 1, (tokens - 1).bit_length())


def least_bytes(
    config: JaxConfig, shape: ModelConfig, computing: Computing, *, trains: bool = True, samples: bool = True
) -> int:
    """Return the memory with which one model can train, or one sequence be sampled."""
    return budget_of(config, shape, computing, 0, trains=trains, samples=samples).needed(1 if trains else 0)


def require_enough(budget: Budget) -> None:
    """Raise ConfigError if not even one model, or for a sampler one sequence, fits."""
    config, costs = budget.config, budget.costs
    least = least_bytes(config, costs.shape, costs.computing, trains=budget.trains, samples=budget.samples)
    if budget.memory is not None and budget.memory < least:
        what = "to train one model" if budget.trains else "to sample from adapters"
        msg = (
            f"each device has {budget.memory / _GIB:.3f} GiB, and needs {least / _GIB:.3f} {what} of LoRA rank "
            f"{config.max_lora_rank}; use a mesh of more devices, or lower max_context_tokens, max_batch_tokens, "
            "decode_slots or max_lora_rank"
        )
        raise ConfigError(msg)
