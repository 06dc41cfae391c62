"""Qwen3, dense and with experts, and the language part of Qwen3-VL: queries and keys are normalised.

Where there are no images, the three positions of a token in Qwen3-VL are one.
"""

from collections.abc import Mapping
from pathlib import Path

from tinsmith_checkpoints.huggingface import EXPERT_FIELDS, NO_WINDOW_FIELDS, Json, no_meaning
from tinsmith_jax import Attention, ModelConfig, decoder, family
from tinsmith_jax.family_fields import BIASES

_FIELDS_VL = {**BIASES, "sliding_window": no_meaning("transformers does not read it, either")}


@family("Qwen3ForCausalLM", fields={**BIASES, **NO_WINDOW_FIELDS})
@family("Qwen3MoeForCausalLM", fields={**BIASES, **NO_WINDOW_FIELDS, **EXPERT_FIELDS})
def qwen3(config: Mapping[str, Json], path: Path) -> ModelConfig:
    bias = bool(config.get("attention_bias"))
    return decoder(config, path, attention=Attention(qkv_bias=bias, o_bias=bias, qk_norm="head"))


@family("Qwen3VLForConditionalGeneration", fields=_FIELDS_VL)
@family("Qwen3VLMoeForConditionalGeneration", fields={**_FIELDS_VL, **EXPERT_FIELDS})
def qwen3_vl(config: Mapping[str, Json], path: Path) -> ModelConfig:
    bias = bool(config.get("attention_bias"))
    return decoder(
        {"norm_topk_prob": True, **config},
        path,
        attention=Attention(qkv_bias=bias, o_bias=bias, qk_norm="head"),
    )
