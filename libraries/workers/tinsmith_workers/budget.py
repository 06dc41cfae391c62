"""The capacity of a worker: tokens of a micro-batch, models in training, and whether one more model fits."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Final, Self

from tinsmith.errors import ConfigError, OutOfMemoryError
from tinsmith_checkpoints.huggingface.decoder import DecoderShape
from tinsmith_workers.config import TrainingWorkersConfig

_GIB: Final = 2**30


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """A subclass counts memory. Without one, leave `memory` at None: nothing is refused for its sake."""

    REMEDY: ClassVar[str] = "use devices with more memory"
    """Another remedy if not even one model fits."""

    config: TrainingWorkersConfig
    shape: DecoderShape
    data_parallel: int  # workers, or groups of them, that compute sequences of their own
    context_tokens: int  # of the longest sequence
    micro_tokens: int  # of the largest micro-batch of one of them
    memory: int | None = None  # of a worker; None: it is not known

    @classmethod
    def uncounted(cls, config: TrainingWorkersConfig, shape: DecoderShape, data_parallel: int, *, on_cpu: bool) -> Self:
        """Return what the settings say, or else is usual, whatever memory there is."""
        resolved = config.resolved(on_cpu=on_cpu)
        context = config.max_context_tokens or min(shape.max_position, resolved.longest)
        tokens = max(context, resolved.batch_tokens)
        return cls(config=config, shape=shape, data_parallel=data_parallel, context_tokens=context, micro_tokens=tokens)

    def needed(self, ranks: Sequence[int]) -> int:
        """Return what the fullest worker takes if models of these LoRA ranks train."""
        del ranks
        return 0

    @property
    def least(self) -> int:
        """The memory with which one model of the largest rank trains."""
        return self.needed([self.config.max_lora_rank])

    @property
    def max_models(self) -> int:
        """As many models of the largest rank as fit, and as the settings allow."""
        allowed, largest = self.config.max_models, self.config.max_lora_rank
        if self.memory is None:
            return allowed
        return next((n for n in range(allowed, 0, -1) if self.needed([largest] * n) <= self.memory), 0)

    def check(self, rank: int, held: Sequence[int]) -> None:
        """Raise OutOfMemoryError if such a model does not fit beside models of these LoRA ranks."""
        if self.memory is None or self.needed([*held, rank]) <= self.memory:
            return
        fixed, before, after = self.needed([]), self.needed(held), self.needed([*held, rank])
        msg = (
            f"no memory left for a model of LoRA rank {rank}: on the fullest rank it takes "
            f"{(after - before) / _GIB:.3f} GiB (weights, gradients, moments, what a pass adds up); of "
            f"{self.memory / _GIB:.3f} GiB the base model and micro-batches of {self.micro_tokens} tokens take "
            f"{fixed / _GIB:.3f}, other models {(before - fixed) / _GIB:.3f}; end a session that has a model, or ask "
            "for a smaller rank"
        )
        raise OutOfMemoryError(msg)

    def require_enough(self) -> None:
        """Raise ConfigError if not even one model fits."""
        if self.memory is not None and self.memory < self.least:
            msg = (
                f"each rank has {self.memory / _GIB:.3f} GiB, and the fullest needs {self.least / _GIB:.3f} to train "
                f"one model of LoRA rank {self.config.max_lora_rank}; {self.REMEDY}, or lower max_context_tokens, "
                "max_batch_tokens or max_lora_rank"
            )
            raise ConfigError(msg)
