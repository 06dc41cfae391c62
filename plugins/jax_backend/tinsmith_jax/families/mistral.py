"""Mistral: Llama's layers, of which older models see a window."""

from collections.abc import Mapping
from pathlib import Path

from tinsmith.huggingface import Json, read_rope
from tinsmith_jax import LayerKind, ModelConfig, decoder, family


@family("MistralForCausalLM")
def mistral(config: Mapping[str, Json], path: Path) -> ModelConfig:
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    kind = LayerKind(rope=read_rope(config, head_dim, str(path)), window=config.get("sliding_window"))
    return decoder(config, path, kinds={"all": kind}, layer_types=("all",) * config["num_hidden_layers"])
