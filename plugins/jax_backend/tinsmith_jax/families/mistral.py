"""Mistral: Llama's layers, of which older models see a window."""

from collections.abc import Mapping
from pathlib import Path

from tinsmith_checkpoints.huggingface import Json, read_rope
from tinsmith_jax import LayerKind, ModelConfig, decoder, family, head_dim


@family("MistralForCausalLM")
def mistral(config: Mapping[str, Json], path: Path) -> ModelConfig:
    kind = LayerKind(rope=read_rope(config, head_dim(config), str(path)), window=config.get("sliding_window"))
    return decoder(config, path, kinds={"all": kind}, layer_types=("all",) * config["num_hidden_layers"])
