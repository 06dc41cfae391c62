"""Qwen3, dense and with experts: queries and keys are normalised."""

from collections.abc import Mapping
from pathlib import Path

from tinsmith_checkpoints.huggingface import Json
from tinsmith_jax import Attention, ModelConfig, decoder, family, refuse


@family("Qwen3ForCausalLM")
@family("Qwen3MoeForCausalLM")
def qwen3(config: Mapping[str, Json], path: Path) -> ModelConfig:
    refuse(config, path, "use_sliding_window")
    bias = bool(config.get("attention_bias"))
    return decoder(config, path, attention=Attention(qkv_bias=bias, o_bias=bias, qk_norm="head"))
