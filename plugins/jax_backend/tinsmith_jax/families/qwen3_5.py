"""Qwen3.5 and Qwen3-Next: three layers of the gated delta rule to one of attention with gates.

Norms' weights are stored less 1.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path

from tinsmith_checkpoints.huggingface import Json, read_rope
from tinsmith_jax import Attention, DeltaRule, LayerKind, ModelConfig, Norms, decoder, family, head_dim


@family("Qwen3NextForCausalLM")
@family("Qwen3_5ForCausalLM")
@family("Qwen3_5ForConditionalGeneration")
@family("Qwen3_5MoeForCausalLM")
@family("Qwen3_5MoeForConditionalGeneration")
def qwen3_5(config: Mapping[str, Json], path: Path) -> ModelConfig:
    config = {"head_dim": 256, "norm_topk_prob": True, **config}
    bias = bool(config.get("attention_bias"))
    rope = read_rope(config, head_dim(config), str(path), partial=0.25)
    return decoder(
        config,
        path,
        kinds={"linear_attention": LayerKind(delta=_delta(config)), "full_attention": LayerKind(rope=rope)},
        layer_types=tuple(config.get("layer_types") or _by_default(config)),
        attention=Attention(qkv_bias=bias, o_bias=bias, qk_norm="head", gated=True),
        norms=Norms(offset=1.0),
    )


def _delta(config: Mapping[str, Json]) -> DeltaRule:
    return DeltaRule(
        key_heads=int(config.get("linear_num_key_heads", 16)),
        value_heads=int(config.get("linear_num_value_heads", 32)),
        key_dim=int(config.get("linear_key_head_dim", 128)),
        value_dim=int(config.get("linear_value_head_dim", 128)),
        width=int(config.get("linear_conv_kernel_dim", 4)),
    )


def _by_default(config: Mapping[str, Json]) -> Iterator[str]:
    every = int(config.get("full_attention_interval") or 4)
    for layer in range(int(config["num_hidden_layers"])):
        yield "linear_attention" if (layer + 1) % every else "full_attention"
