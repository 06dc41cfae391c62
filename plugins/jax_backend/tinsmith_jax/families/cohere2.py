"""Command R7B and A: attention and MLP side by side; most layers see a window, and the others encode no positions."""

from collections.abc import Mapping
from pathlib import Path

from tinsmith_checkpoints.huggingface import OFF, Json, honoured, only, read_rope
from tinsmith_jax import Attention, LayerKind, ModelConfig, Norms, decoder, family, head_dim
from tinsmith_jax.family_fields import BIASES, WINDOWS

_FIELDS = {
    **BIASES,
    **WINDOWS,
    "layer_norm_eps": honoured(),
    "logit_scale": honoured(),
    "use_qk_norm": only(*OFF, otherwise="queries and keys of this family are not normalised here"),
}


@family("Cohere2ForCausalLM", fields=_FIELDS)
def cohere2(config: Mapping[str, Json], path: Path) -> ModelConfig:
    config = {"tie_word_embeddings": True, "rms_norm_eps": config.get("layer_norm_eps", 1e-5), **config}
    number, every = int(config["num_hidden_layers"]), int(config.get("sliding_window_pattern") or 4)
    by_default = ("sliding_attention" if (i + 1) % every else "full_attention" for i in range(number))
    rope, bias = read_rope(config, head_dim(config), str(path)), bool(config.get("attention_bias"))
    return decoder(
        config,
        path,
        kinds={
            "sliding_attention": LayerKind(rope=rope, window=config.get("sliding_window", 4096)),
            "full_attention": LayerKind(rope=None),
        },
        layer_types=tuple(config.get("layer_types") or by_default),
        attention=Attention(qkv_bias=bias, o_bias=bias, alternate=True),
        norms=Norms(before_mlp=None, centred=True),
        parallel=True,
        logits_scale=float(config.get("logit_scale", 0.0625)),
    )
