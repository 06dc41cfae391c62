"""Descriptions of models by name, so that nothing has to be downloaded."""

from pathlib import Path

from tinsmith import ConfigError
from tinsmith_checkpoints.huggingface import known_config
from tinsmith_checkpoints.huggingface.known_shapes import KNOWN_SHAPES
from tinsmith_jax.families import config_of, read_config
from tinsmith_jax.model_config import ModelConfig


def read_model(name: str) -> ModelConfig:
    """Return a well-known model's, or one from a directory with config.json. Raise ConfigError for neither."""
    if (config := known_config(name)) is not None:
        return config_of(config, Path(name))
    if not Path(name).is_dir():
        msg = f"no model named {name!r}: give a directory with config.json, or one of {', '.join(KNOWN_SHAPES)}"
        raise ConfigError(msg)
    return read_config(Path(name))
