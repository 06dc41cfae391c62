"""The facts about a base model that the engine's side needs, read from its config.json. No torch."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from tinsmith import ConfigError
from tinsmith_checkpoints.huggingface import HEAD, DecoderShape, Json, decoder_shape, read_model_config

ARCHITECTURES = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
"""transformers classes that are a plain chain of embedding, layers, norm and head, and whose layers use the same names
for their matrices. A test compares each with transformers' own forward pass."""


def read_architecture(directory: Path) -> DecoderShape:
    """Read `directory`/config.json. Raise ConfigError if it is missing, broken or of an unsupported kind.

    `max_position` is capped at the sliding window, if there is one. Up to that length, a sliding window equals the full
    attention that this backend computes.
    """
    return architecture_of(read_model_config(directory), directory / "config.json")


def architecture_of(config: Mapping[str, Json], path: Path) -> DecoderShape:
    """Do the same with what has been read. `path` names the file in errors."""
    shape = decoder_shape(config, path, supported=ARCHITECTURES)
    _check_groups(shape, path)
    window = _sliding_window(config, shape.class_name)
    return replace(shape, max_position=min(shape.max_position, window or shape.max_position))


def _check_groups(shape: DecoderShape, path: Path) -> None:
    if shape.int8 is None or shape.int8.group_size is None:
        return
    for module, (columns, _) in shape.linear_shapes().items():
        if module != HEAD and columns % shape.int8.group_size:
            msg = (
                f"{path}: group_size of the 8-bit integers ({shape.int8.group_size}) must divide the {columns} columns "
                f"of {module}; quantise with the strategy channel, or with another group_size"
            )
            raise ConfigError(msg)


def _sliding_window(config: Mapping[str, Json], class_name: str) -> int | None:
    window = config.get("sliding_window")
    slides = config.get("use_sliding_window", class_name == "MistralForCausalLM")
    return int(window) if window and slides else None
