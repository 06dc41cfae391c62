"""The facts about a base model that the engine's side needs, read from its config.json. No torch."""

from collections.abc import Mapping
from pathlib import Path

from tinsmith import ConfigError
from tinsmith_checkpoints.huggingface import HEAD, DecoderShape, Json, decoder_shape, read_model_config

DIVISIBLE = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
"""Classes whose layers tensor parallelism divides: their norms are before attention and MLP, and of single heads."""


def read_architecture(directory: Path) -> DecoderShape:
    """Read `directory`/config.json. Raise ConfigError if it is missing, broken or of an unsupported kind.

    Which classes of transformers can be trained, the ranks find out: see probe.py.
    """
    return architecture_of(read_model_config(directory), directory / "config.json")


def architecture_of(config: Mapping[str, Json], path: Path) -> DecoderShape:
    """Do the same with a parsed configuration. `path` names the file in errors."""
    class_name = next(iter(config.get("architectures") or ["(none named)"]))
    if not class_name.endswith("ForCausalLM"):
        msg = f"{path}: architecture {class_name!r} is not supported, only those for text alone (...ForCausalLM)"
        raise ConfigError(msg)
    shape = decoder_shape(config, path, supported=[class_name])
    if shape.experts is not None:
        msg = (
            f"{path}: {class_name} is a mixture of experts, which the fsdp backend does not train; use the backend "
            "megatron or jax"
        )
        raise ConfigError(msg)
    _check_groups(shape, path)
    return shape


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
