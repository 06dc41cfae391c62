"""Gemma 3, of which the language part is trained: norms around attention and MLP; most layers see a window.

Norms' weights are stored less 1.
"""

from collections.abc import Mapping
from pathlib import Path

from tinsmith_checkpoints.huggingface import OFF, Json, honoured, no_meaning, only
from tinsmith_jax import Attention, ModelConfig, Norms, decoder, family, sliding_and_full
from tinsmith_jax.family_fields import BIASES, WINDOWS

_NO_CAP = only(None, 0, 0.0, otherwise="scores and logits of this family have no soft cap here")
_FIELDS = {
    **BIASES,
    **WINDOWS,
    **dict.fromkeys(("query_pre_attn_scalar", "hidden_activation", "rope_local_base_freq"), honoured()),
    "_sliding_window_pattern": no_meaning("`layer_types` decides"),
    "hidden_act": no_meaning("`hidden_activation` decides, as in transformers"),
    "attn_logit_softcapping": _NO_CAP,
    "final_logit_softcapping": _NO_CAP,
    "use_bidirectional_attention": only(*OFF, otherwise="tokens see only those before them here"),
}
_DEFAULTS: Mapping[str, Json] = {
    "vocab_size": 262_208,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "max_position_embeddings": 131_072,
    "tie_word_embeddings": True,
}
"""What files leave out."""


@family("Gemma3ForCausalLM", fields=_FIELDS)
@family("Gemma3ForConditionalGeneration", fields=_FIELDS)
def gemma3(config: Mapping[str, Json], path: Path) -> ModelConfig:
    config = {**_DEFAULTS, **config}
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
