"""Qwen3.5 and Qwen3-Next: three layers of the gated delta rule to one of attention with gates.

Norms' weights are stored less 1.
"""

from collections.abc import Mapping
from pathlib import Path

from tinsmith_checkpoints.huggingface import DELTA_FIELDS, EXPERT_FIELDS, Json, delta_rule, mixers, read_rope
from tinsmith_jax import Attention, LayerKind, ModelConfig, Norms, decoder, family, head_dim
from tinsmith_jax.family_fields import BIASES

_FIELDS = {**BIASES, **DELTA_FIELDS}


@family("Qwen3NextForCausalLM", fields={**_FIELDS, **EXPERT_FIELDS})
@family("Qwen3_5ForCausalLM", fields=_FIELDS)
@family("Qwen3_5ForConditionalGeneration", fields=_FIELDS)
@family("Qwen3_5MoeForCausalLM", fields={**_FIELDS, **EXPERT_FIELDS})
@family("Qwen3_5MoeForConditionalGeneration", fields={**_FIELDS, **EXPERT_FIELDS})
def qwen3_5(config: Mapping[str, Json], path: Path) -> ModelConfig:
    config = {"head_dim": 256, "norm_topk_prob": True, **config}
    bias = bool(config.get("attention_bias"))
    rope = read_rope(config, head_dim(config), str(path), partial=0.25)
    return decoder(
        config,
        path,
        kinds={"linear_attention": LayerKind(delta=delta_rule(config)), "full_attention": LayerKind(rope=rope)},
        layer_types=mixers(config, path),
        attention=Attention(qkv_bias=bias, o_bias=bias, qk_norm="head", gated=True),
        norms=Norms(offset=1.0),
    )
