"""Mistral, and the language part of Mistral 3: Llama's layers, of which older models see a window."""

from collections.abc import Mapping
from pathlib import Path

from tinsmith import ConfigError
from tinsmith_checkpoints.huggingface import Json, honoured, read_rope
from tinsmith_jax import LayerKind, ModelConfig, decoder, family, head_dim

_FIELDS = {"sliding_window": honoured("of all layers")}


@family("Mistral3ForConditionalGeneration", fields=_FIELDS)
@family("MistralForCausalLM", fields=_FIELDS)
def mistral(config: Mapping[str, Json], path: Path) -> ModelConfig:
    if config.get("model_type") == "ministral3":
        msg = f"{path}: a language part of the type 'ministral3', which scales queries by position, is not supported"
        raise ConfigError(msg)
    kind = LayerKind(rope=read_rope(config, head_dim(config), str(path)), window=config.get("sliding_window"))
    return decoder(config, path, kinds={"all": kind}, layer_types=("all",) * config["num_hidden_layers"])
