"""Phi-3 and Phi-4: Llama's layers, with joined matrices in their files; some rotate a part of each head."""

from collections.abc import Mapping
from pathlib import Path

from tinsmith_checkpoints.huggingface import Json, honoured, no_meaning, read_rope
from tinsmith_jax import LayerKind, ModelConfig, decoder, family, head_dim

_FIELDS = {
    **dict.fromkeys(("sliding_window", "original_max_position_embeddings"), honoured()),
    **dict.fromkeys(
        ("embd_pdrop", "resid_pdrop"),
        no_meaning("act in the training of the base model alone; there is no dropout here"),
    ),
}


@family("Phi3ForCausalLM", fields=_FIELDS)
def phi3(config: Mapping[str, Json], path: Path) -> ModelConfig:
    """Of frequencies for short and long sequences, the short ones are used, so sequences are no longer than these."""
    rope = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    original = int(rope.get("original_max_position_embeddings") or config.get("original_max_position_embeddings", 4096))
    longest = None
    if (rope.get("rope_type") or rope.get("type") or "default") != "default":  # older files say "su" or "yarn"
        of_long = {**rope, "rope_type": "longrope", "original_max_position_embeddings": original}
        config, longest = {**config, "rope_parameters": of_long}, original
    kind = LayerKind(
        rope=read_rope(config, head_dim(config), str(path), partial=1.0), window=config.get("sliding_window")
    )
    return decoder(
        {"rms_norm_eps": 1e-5, **config},
        path,
        longest=longest,
        kinds={"all": kind},
        layer_types=("all",) * config["num_hidden_layers"],
    )
