"""Granite 3: Llama's layers, with multipliers."""

from collections.abc import Mapping
from pathlib import Path

from tinsmith_checkpoints.huggingface import Json, honoured
from tinsmith_jax import Attention, ModelConfig, decoder, family
from tinsmith_jax.family_fields import MLP_BIASES

_FIELDS = {
    **MLP_BIASES,
    **dict.fromkeys(
        ("attention_multiplier", "embedding_multiplier", "residual_multiplier", "logits_scaling"), honoured()
    ),
}


@family("GraniteForCausalLM", fields=_FIELDS)
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
