"""Qwen2 and Qwen2.5: queries, keys and values have biases."""

from collections.abc import Mapping
from pathlib import Path

from tinsmith_checkpoints.huggingface import Json
from tinsmith_jax import Attention, ModelConfig, decoder, family, refuse


@family("Qwen2ForCausalLM")
def qwen2(config: Mapping[str, Json], path: Path) -> ModelConfig:
    refuse(config, path, "use_sliding_window")
    return decoder(config, path, attention=Attention(qkv_bias=True))
