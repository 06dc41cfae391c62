"""Llama 2 and 3, and models with their layers."""

from collections.abc import Mapping
from pathlib import Path

from tinsmith_checkpoints.huggingface import Json
from tinsmith_jax import Attention, ModelConfig, decoder, family
from tinsmith_jax.family_fields import MLP_BIASES


@family("LlamaForCausalLM", fields=MLP_BIASES)
def llama(config: Mapping[str, Json], path: Path) -> ModelConfig:
    bias = bool(config.get("attention_bias"))
    return decoder(config, path, attention=Attention(qkv_bias=bias, o_bias=bias), mlp_bias=bool(config.get("mlp_bias")))
