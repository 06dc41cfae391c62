"""Gemma 3 without images: norms around attention and MLP, with weights stored less 1; most layers see a window."""

from collections.abc import Mapping
from pathlib import Path

from tinsmith_checkpoints.huggingface import Json
from tinsmith_jax import Attention, ModelConfig, Norms, decoder, family, refuse, sliding_and_full


@family("Gemma3ForCausalLM")
def gemma3(config: Mapping[str, Json], path: Path) -> ModelConfig:
    refuse(config, path, "attn_logit_softcapping", "final_logit_softcapping", "use_bidirectional_attention")
    config = {"tie_word_embeddings": True, "head_dim": 256, **config}
    kinds, layer_types = sliding_and_full(
        config,
        path,
        every=config.get("sliding_window_pattern", 6),
        sliding_theta=config.get("rope_local_base_freq", 10_000.0),
        full_theta=config.get("rope_theta", 1_000_000.0),
    )
    bias = bool(config.get("attention_bias"))
    divisor = config.get("query_pre_attn_scalar", 256)
    return decoder(
        config,
        path,
        kinds=kinds,
        layer_types=layer_types,
        activation=config.get("hidden_activation", "gelu_pytorch_tanh"),
        attention=Attention(
            qkv_bias=bias,
            o_bias=bias,
            qk_norm="head",
            scale=None if divisor == config["head_dim"] else float(divisor) ** -0.5,
        ),
        norms=Norms(
            after_attention="post_attention_layernorm",
            before_mlp="pre_feedforward_layernorm",
            after_mlp="post_feedforward_layernorm",
            offset=1.0,
        ),
        embedding_scale=float(config["hidden_size"]) ** 0.5,
    )
