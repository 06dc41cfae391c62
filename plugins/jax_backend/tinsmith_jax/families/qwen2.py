"""Qwen2 and Qwen2.5: queries, keys and values have biases."""

from collections.abc import Mapping
from pathlib import Path

from tinsmith_checkpoints.huggingface import NO_WINDOW_FIELDS, Json
from tinsmith_jax import Attention, ModelConfig, decoder, family


@family("Qwen2ForCausalLM", fields=NO_WINDOW_FIELDS)
def qwen2(config: Mapping[str, Json], path: Path) -> ModelConfig:
    return decoder(config, path, attention=Attention(qkv_bias=True))
