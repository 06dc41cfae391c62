"""Seed-OSS: Llama's layers, with biases of queries, keys and values, and of others where config.json says so."""

from collections.abc import Mapping
from pathlib import Path

from tinsmith_checkpoints.huggingface import Json
from tinsmith_jax import Attention, ModelConfig, decoder, family


@family("SeedOssForCausalLM")
def seed_oss(config: Mapping[str, Json], path: Path) -> ModelConfig:
    return decoder(
        {"head_dim": 128, **config},
        path,
        attention=Attention(
            qkv_bias=bool(config.get("attention_bias", True)), o_bias=bool(config.get("attention_out_bias"))
        ),
        mlp_bias=bool(config.get("mlp_bias")),
    )
