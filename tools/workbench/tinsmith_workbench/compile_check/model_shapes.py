"""Shapes of well-known models, so that nothing has to be downloaded: what their config.json says that matters here."""

from collections.abc import Mapping
from pathlib import Path
from typing import Final

from tinsmith import ConfigError
from tinsmith_checkpoints.values import Json
from tinsmith_jax.families import config_of, read_config
from tinsmith_jax.model_config import ModelConfig

Config = Mapping[str, Json]

_QWEN3: Final[Config] = {
    "architectures": ["Qwen3ForCausalLM"],
    "vocab_size": 151936,
    "head_dim": 128,
    "num_key_value_heads": 8,
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1_000_000,
    "tie_word_embeddings": False,
}
_LLAMA3: Final[Config] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 128256,
    "num_key_value_heads": 8,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500_000.0,
    "tie_word_embeddings": False,
}


def _with(
    family: Config, *, hidden_size: int, intermediate_size: int, num_hidden_layers: int, num_attention_heads: int
) -> Config:
    return {
        **family,
        "hidden_size": hidden_size,
        "intermediate_size": intermediate_size,
        "num_hidden_layers": num_hidden_layers,
        "num_attention_heads": num_attention_heads,
    }


SHAPES: Final[Mapping[str, Config]] = {
    "Qwen3-8B": _with(
        _QWEN3, hidden_size=4096, intermediate_size=12288, num_hidden_layers=36, num_attention_heads=32
    ),
    "Qwen3-32B": _with(
        _QWEN3, hidden_size=5120, intermediate_size=25600, num_hidden_layers=64, num_attention_heads=64
    ),
    "Llama-3-8B": _with(
        _LLAMA3, hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32
    ),
    "Llama-3-70B": _with(
        _LLAMA3, hidden_size=8192, intermediate_size=28672, num_hidden_layers=80, num_attention_heads=64
    ),
}  # fmt: skip


def read_model(name: str) -> ModelConfig:
    """Return a shape by its name, or from a directory with config.json. Raise ConfigError for neither."""
    if name in SHAPES:
        return config_of(SHAPES[name], Path(name))
    if not Path(name).is_dir():
        msg = f"no model named {name!r}: give a directory with config.json, or one of {', '.join(SHAPES)}"
        raise ConfigError(msg)
    return read_config(Path(name))
