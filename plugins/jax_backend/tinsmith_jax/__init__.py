"""The JAX backend. Its exports describe a family of models."""

from tinsmith_checkpoints.huggingface import DeltaRule, Mamba
from tinsmith_jax.families import Family, config_of, family
from tinsmith_jax.model_config import (
    Activation,
    Attention,
    Clamped,
    Groups,
    Latent,
    LayerKind,
    Mixture,
    ModelConfig,
    Norms,
    decoder,
    head_dim,
    refuse,
    sliding_and_full,
)

__all__ = [
    "Activation",
    "Attention",
    "Clamped",
    "DeltaRule",
    "Family",
    "Groups",
    "Latent",
    "LayerKind",
    "Mamba",
    "Mixture",
    "ModelConfig",
    "Norms",
    "config_of",
    "decoder",
    "family",
    "head_dim",
    "refuse",
    "sliding_and_full",
]
