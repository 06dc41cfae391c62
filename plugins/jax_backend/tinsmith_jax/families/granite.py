"""Granite 3: Llama's layers, with multipliers."""

from collections.abc import Mapping
from pathlib import Path

from tinsmith_checkpoints.huggingface import Json
from tinsmith_jax import Attention, ModelConfig, decoder, family


@family("GraniteForCausalLM")
def granite(config: Mapping[str, Json], path: Path) -> ModelConfig:
    bias = bool(config.get("attention_bias"))
    return decoder(
        config,
        path,
        attention=Attention(qkv_bias=bias, o_bias=bias, scale=float(config.get("attention_multiplier", 1))),
        mlp_bias=bool(config.get("mlp_bias")),
        embedding_scale=float(config.get("embedding_multiplier", 1)),
        residual_scale=float(config.get("residual_multiplier", 1)),
        logits_scale=1 / float(config.get("logits_scaling", 1)),
    )
