"""Gemma 2: soft caps of scores and logits; norms around attention and MLP; every other layer sees a window."""

from collections.abc import Mapping
from pathlib import Path

from tinsmith_checkpoints.huggingface import OFF, Json, honoured, no_meaning, only, read_rope
from tinsmith_jax import Attention, LayerKind, ModelConfig, Norms, decoder, family, head_dim
from tinsmith_jax.family_fields import BIASES, WINDOWS

_FIELDS = {
    **BIASES,
    **WINDOWS,
    **dict.fromkeys(
        ("query_pre_attn_scalar", "attn_logit_softcapping", "final_logit_softcapping", "hidden_activation"), honoured()
    ),
    "hidden_act": no_meaning("`hidden_activation` decides, as in transformers"),
    "use_bidirectional_attention": only(*OFF, otherwise="tokens see only those before them here"),
}


@family("Gemma2ForCausalLM", fields=_FIELDS)
def gemma2(config: Mapping[str, Json], path: Path) -> ModelConfig:
    config = {"tie_word_embeddings": True, "head_dim": 256, **config}
    rope, bias = read_rope(config, head_dim(config), str(path)), bool(config.get("attention_bias"))
    by_default = ("sliding_attention", "full_attention") * int(config["num_hidden_layers"])
    return decoder(
        config,
        path,
        kinds={
            "sliding_attention": LayerKind(rope=rope, window=config.get("sliding_window", 4096)),
            "full_attention": LayerKind(rope=rope),
        },
        layer_types=tuple(config.get("layer_types") or by_default[: config["num_hidden_layers"]]),
        activation=config.get("hidden_activation", "gelu_pytorch_tanh"),
        attention=Attention(
            qkv_bias=bias,
            o_bias=bias,
            scale=float(config.get("query_pre_attn_scalar", 256)) ** -0.5,
            cap=config.get("attn_logit_softcapping", 50.0),
        ),
        norms=Norms(
            after_attention="post_attention_layernorm",
            before_mlp="pre_feedforward_layernorm",
            after_mlp="post_feedforward_layernorm",
            offset=1.0,
        ),
        embedding_scale=float(config["hidden_size"]) ** 0.5,
        logits_cap=config.get("final_logit_softcapping", 30.0),
    )
