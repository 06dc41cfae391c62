"""Seed-OSS: Llama's layers, with biases of queries, keys and values, and of others where config.json says so."""

from collections.abc import Mapping
from pathlib import Path

from tinsmith_checkpoints.huggingface import Json, honoured, no_meaning
from tinsmith_jax import Attention, ModelConfig, decoder, family
from tinsmith_jax.family_fields import MLP_BIASES

_FIELDS = {
    **MLP_BIASES,
    "attention_out_bias": honoured(),
    "residual_dropout": no_meaning("acts in the training of the base model alone; there is no dropout here"),
}


@family("SeedOssForCausalLM", fields=_FIELDS)
def seed_oss(config: Mapping[str, Json], path: Path) -> ModelConfig:
    return decoder(
        {"head_dim": 128, **config},
        path,
        attention=Attention(
            qkv_bias=bool(config.get("attention_bias", True)), o_bias=bool(config.get("attention_out_bias"))
        ),
        mlp_bias=bool(config.get("mlp_bias")),
    )
