"""The files beside the weights of a Hugging Face directory: its configuration and its tokenizer."""

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import Final

from tinsmith_checkpoints.errors import ConfigError, ServerError, TinsmithError
from tinsmith_checkpoints.huggingface.outside_files import read_json, read_optional_object
from tinsmith_checkpoints.huggingface.safetensors_files import shard_files
from tinsmith_checkpoints.values import Json

_BESIDE_THE_WEIGHTS: Final = ("*.json", "*.model", "*.txt", "*.jinja", "additional_chat_templates/*.jinja")
"""Patterns of configuration and tokenizer files."""

_NOT_OURS: Final = ("adapter_config.json", "tinsmith.json")


def is_beside_the_weights(name: str) -> bool:
    """Return whether a file of a model belongs to its configuration or tokenizer. `name`: its path in the directory."""
    return any(PurePosixPath(f"/{name}").match(f"/{pattern}") for pattern in _BESIDE_THE_WEIGHTS)


def read_model_config(directory: Path) -> dict[str, Json]:
    """Read config.json. Raise ConfigError if it is missing or is not a JSON object."""
    file = directory / "config.json"
    try:
        config = read_json(file)
    except FileNotFoundError as error:
        msg = f"{str(directory)!r} is not a Hugging Face model directory: it has no config.json"
        raise ConfigError(msg) from error
    except (OSError, ValueError) as error:
        msg = f"{str(file)!r} cannot be read as JSON: {error}"
        raise ConfigError(msg) from error
    if not isinstance(config, dict):
        msg = f"{str(file)!r} does not hold a JSON object"
        raise ConfigError(msg)
    return config


@contextmanager
def understood(file: Path) -> Iterator[None]:
    """Raise ConfigError if the block cannot work with the values of this file, whatever they are."""
    try:
        yield
    except TinsmithError:
        raise
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        msg = f"{file}: a value has another type or size than expected ({type(error).__name__}: {error})"
        raise ConfigError(msg) from error


def missing_files(directory: Path) -> list[str]:
    """Return the names of required files that are missing; empty if none are."""
    try:
        weights = shard_files(directory, "model") or [directory / "model.safetensors"]
    except ServerError:
        return ["model.safetensors.index.json"]
    return [file.name for file in (directory / "config.json", *weights) if not file.is_file()]


def copy_model_files(source: Path, target: Path, *, dtype: str, tied: bool | None = None) -> None:
    """Copy configuration and tokenizer, so that the target loads on its own, with unquantised weights of this dtype."""
    config = read_model_config(source)
    config.pop("torch_dtype", None)
    config.pop("quantization_config", None)
    config["dtype"] = dtype
    if tied is not None:
        config["tie_word_embeddings"] = tied
    named = _named_templates(source)
    for file in sorted({file for pattern in _BESIDE_THE_WEIGHTS for file in source.glob(pattern)}):
        is_template = bool(named) and file.suffix == ".jinja"
        if file.is_file() and not is_template and not file.name.endswith(".index.json") and file.name not in _NOT_OURS:
            shutil.copyfile(file, target / file.name)
    if named:
        tokenizer = {**read_optional_object(source / "tokenizer_config.json"), "chat_template": named}
        (target / "tokenizer_config.json").write_text(json.dumps(tokenizer, indent=2) + "\n", encoding="utf-8")
    (target / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def _named_templates(source: Path) -> list[Json]:
    """Return a model's chat templates as a list for tokenizer_config.json, if some have files in a directory.

    Copies are flat, as checkpoints are.
    """
    files = {file.stem: file for file in sorted((source / "additional_chat_templates").glob("*.jinja"))}
    if files and (default := source / "chat_template.jinja").exists():
        files["default"] = default
    return [{"name": name, "template": file.read_text(encoding="utf-8")} for name, file in files.items()]
