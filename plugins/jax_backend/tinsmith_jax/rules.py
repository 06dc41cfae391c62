"""Which module computes the layers of a model that have a recurrent state. Both have functions of the same names."""

from types import ModuleType

from tinsmith_jax import gated_delta, mamba
from tinsmith_jax.model_config import ModelConfig


def rule_of(config: ModelConfig) -> ModuleType:
    return gated_delta if config.delta is not None else mamba
