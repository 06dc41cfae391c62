"""The capacity of a worker: tokens of a micro-batch, models in training, and whether one more model fits."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar, Final

from tinsmith.errors import ConfigError, OutOfMemoryError
from tinsmith.huggingface.decoder import DecoderShape
from tinsmith.workers.config import TrainingWorkersConfig

_GIB: Final = 2**30


class Budget(ABC):
    """A subclass counts. `memory` None: it is not known, and nothing is refused for its sake."""

    REMEDY: ClassVar[str]
    """Another remedy if not even one model fits."""

    config: TrainingWorkersConfig
    shape: DecoderShape
    memory: int | None
    context_tokens: int
    micro_tokens: int

    @property
    @abstractmethod
    def data_parallel(self) -> int:
        """Workers, or groups of them, that compute sequences of their own."""

    @abstractmethod
    def needed(self, ranks: Sequence[int]) -> int:
        """Return what the fullest worker takes if models of these LoRA ranks train."""

    @property
    @abstractmethod
    def least(self) -> int:
        """The memory with which one model of the largest rank trains."""

    @property
    @abstractmethod
    def max_models(self) -> int:
        """As many models of the largest rank as fit, and as the settings allow."""

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
