"""Qwen2-MoE: Qwen2 with experts, one of which computes every token."""

from collections.abc import Mapping
from pathlib import Path

from tinsmith_checkpoints.huggingface import Json
from tinsmith_jax import Attention, ModelConfig, decoder, family, refuse


@family("Qwen2MoeForCausalLM")
def qwen2_moe(config: Mapping[str, Json], path: Path) -> ModelConfig:
    refuse(config, path, "use_sliding_window")
    return decoder(config, path, attention=Attention(qkv_bias=bool(config.get("qkv_bias", True))))
