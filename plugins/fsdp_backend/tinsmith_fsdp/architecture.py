"""The facts about a base model that the engine's side needs, read from its config.json. No torch."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Final

from tinsmith import ConfigError
from tinsmith_checkpoints.huggingface import (
    DECODER_FIELDS,
    HEAD,
    DecoderShape,
    FileFields,
    HybridShape,
    Json,
    decoder_shape,
    hybrid_shape,
    joined_matrices,
    language_config,
    latent_shape,
    read_model_config,
    understood,
)

DIVISIBLE = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
"""Classes whose layers tensor parallelism divides: their norms are before attention and MLP, and of single heads."""


SEES: Final = "ForConditionalGeneration"
"""How the classes of models end that also see or hear: their language part is trained."""


def read_architecture(directory: Path, context_tokens: int | None = None) -> DecoderShape:
    """Read `directory`/config.json. Raise ConfigError if it is missing, broken or of an unsupported kind.

    `context_tokens`: of the longest sequence, if the settings say so; the model must compute it as it does short ones.
    Which classes of transformers can be trained, the ranks find out: see probe.py.
    """
    return architecture_of(read_model_config(directory), directory / "config.json", context_tokens)


def architecture_of(config: Mapping[str, Json], path: Path, context_tokens: int | None = None) -> DecoderShape:
    """Do the same with a parsed configuration. `path` names the file in errors."""
    with understood(path):
        return _described(config, path, context_tokens)


def _described(config: Mapping[str, Json], path: Path, context_tokens: int | None) -> DecoderShape:
    config = language_config(config)
    class_name = next(iter(config.get("architectures") or ["(none named)"]))
    if not class_name.endswith(("ForCausalLM", SEES)):
        msg = f"{path}: architecture {class_name!r} is not supported, only those for text, ...ForCausalLM and ...{SEES}"
        raise ConfigError(msg)
    if refusals := list(FileFields(class_name, DECODER_FIELDS).refusals(config)):  # of all others, the class sees to
        msg = f"{path}: a {class_name} with these settings is not supported: {'; '.join(refusals)}"
        raise ConfigError(msg)
    if (config.get("quantization_config") or {}).get("quant_method") == "mxfp4":
        config = {**config, "quantization_config": None}  # the tensors say by their names which of them are
    shape = _shape_of(config)(config, path, supported=[class_name])
    if shape.experts is not None and shape.int8 is not None:
        msg = (
            f"{path}: {class_name} has experts of 8-bit integers, which the fsdp backend does not train; use the "
            "unquantised model, or the backend jax"
        )
        raise ConfigError(msg)
    if shape.int8 is not None and isinstance(shape, HybridShape):
        msg = (
            f"{path}: the matrices are 8-bit integers, which the fsdp backend does not train for models with the gated "
            "delta rule; use the unquantised model"
        )
        raise ConfigError(msg)
    _check_groups(shape, path)
    if shape.int8 is not None and (joined := joined_matrices(config)):
        msg = (
            f"{path}: the matrices of {class_name} are 8-bit integers and joined ({joined[0].path}), which the fsdp "
            "backend does not train; use the unquantised model"
        )
        raise ConfigError(msg)
    return _within_short_frequencies(shape, config, path, context_tokens)


def _shape_of(config: Mapping[str, Json]) -> Callable[..., DecoderShape]:
    if "linear_num_key_heads" in config:
        return hybrid_shape
    return latent_shape if "kv_lora_rank" in config else decoder_shape


def _within_short_frequencies(
    shape: DecoderShape, config: Mapping[str, Json], path: Path, context_tokens: int | None
) -> DecoderShape:
    """Return the shape with sequences no longer than those for which longrope has its short frequencies.

    With a longer one in a stream, transformers takes the long frequencies for all of it: neighbours would change.
    """
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if "short_factor" not in rope:
        return shape
    original = rope.get("original_max_position_embeddings") or config.get("original_max_position_embeddings")
    longest = min(shape.max_position, int(original or shape.max_position))
    if context_tokens is not None and context_tokens > longest:
        msg = (
            f"{path}: max_context_tokens is {context_tokens}, and {shape.class_name} has other rotary frequencies for "
            f"sequences of more than {longest} tokens, with which the fsdp backend does not train; set it to at most "
            f"{longest}"
        )
        raise ConfigError(msg)
    return replace(shape, max_position=longest)


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
