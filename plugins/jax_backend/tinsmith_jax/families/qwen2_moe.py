"""Qwen2-MoE: Qwen2 with experts, one of which computes every token."""

from collections.abc import Mapping
from pathlib import Path

from tinsmith_checkpoints.huggingface import EXPERT_FIELDS, NO_WINDOW_FIELDS, Json, honoured
from tinsmith_jax import Attention, ModelConfig, decoder, family


@family("Qwen2MoeForCausalLM", fields={**NO_WINDOW_FIELDS, **EXPERT_FIELDS, "qkv_bias": honoured()})
def qwen2_moe(config: Mapping[str, Json], path: Path) -> ModelConfig:
    return decoder(config, path, attention=Attention(qkv_bias=bool(config.get("qkv_bias", True))))
