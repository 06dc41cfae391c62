"""Qwen3, dense and with experts, and the language part of Qwen3-VL: queries and keys are normalised.

Where there are no images, the three positions of a token in Qwen3-VL are one.
"""

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


@family("Qwen3VLForConditionalGeneration")
@family("Qwen3VLMoeForConditionalGeneration")
def qwen3_vl(config: Mapping[str, Json], path: Path) -> ModelConfig:
    bias = bool(config.get("attention_bias"))
    return decoder(
        {"norm_topk_prob": True, **config},
        path,
        attention=Attention(qkv_bias=bias, o_bias=bias, qk_norm="head"),
    )
