"""SmolLM3: Llama's layers, of which every fourth encodes no positions."""

from collections.abc import Mapping
from pathlib import Path

from tinsmith_checkpoints.huggingface import NO_WINDOW_FIELDS, Json, honoured, read_rope
from tinsmith_jax import Attention, LayerKind, ModelConfig, decoder, family, head_dim
from tinsmith_jax.family_fields import MLP_BIASES

_FIELDS = {**MLP_BIASES, **NO_WINDOW_FIELDS, **dict.fromkeys(("no_rope_layers", "no_rope_layer_interval"), honoured())}


@family("SmolLM3ForCausalLM", fields=_FIELDS)
def smollm3(config: Mapping[str, Json], path: Path) -> ModelConfig:
    config = {"tie_word_embeddings": True, **config}
    number, every = config["num_hidden_layers"], config.get("no_rope_layer_interval", 4)
    rotates = config.get("no_rope_layers") or [(i + 1) % every for i in range(number)]
    kinds = {
        "rotating": LayerKind(rope=read_rope(config, head_dim(config), str(path))),
        "still": LayerKind(rope=None),
    }
    bias = bool(config.get("attention_bias"))
    return decoder(
        config,
        path,
        kinds=kinds,
        layer_types=tuple("rotating" if each else "still" for each in rotates),
        attention=Attention(qkv_bias=bias, o_bias=bias),
        mlp_bias=bool(config.get("mlp_bias")),
    )
