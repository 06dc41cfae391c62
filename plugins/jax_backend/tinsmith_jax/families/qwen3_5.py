"""Qwen3.5: norms with weights stored less 1, attention with gates, which encodes positions in a part of each head."""

from collections.abc import Mapping
from pathlib import Path

from tinsmith.huggingface import Json, read_rope
from tinsmith_jax import Attention, LayerKind, ModelConfig, Norms, decoder, family, head_dim


@family("Qwen3_5ForCausalLM")
@family("Qwen3_5MoeForCausalLM")
def qwen3_5(config: Mapping[str, Json], path: Path) -> ModelConfig:
    config = {"head_dim": 256, "norm_topk_prob": True, **config}
    bias = bool(config.get("attention_bias"))
    rope = read_rope(config, head_dim(config), str(path), partial=0.25)
    return decoder(
        config,
        path,
        kinds={"full_attention": LayerKind(rope=rope)},
        layer_types=tuple(config.get("layer_types") or ()),
        attention=Attention(qkv_bias=bias, o_bias=bias, qk_norm="head", gated=True),
        norms=Norms(offset=1.0),
    )
