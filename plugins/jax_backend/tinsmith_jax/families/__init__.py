"""The families of models: each is a function from config.json to the description of a decoder. No jax.

A file of this package registers its function with `family`. Other distributions name theirs as entry points of the
group `tinsmith_jax.families`, which are loaded when a model is none of ours.
"""

import functools
import importlib
import pkgutil
from collections.abc import Callable, Mapping
from importlib.metadata import entry_points
from pathlib import Path
from typing import Final

from tinsmith import ConfigError
from tinsmith_checkpoints.huggingface import (
    Field,
    FileFields,
    Json,
    check_config,
    check_whole,
    family_table,
    language_config,
    read_model_config,
    understood,
)
from tinsmith_jax.model_config import ModelConfig

Family = Callable[[Mapping[str, Json], Path], ModelConfig]
"""Describes a decoder, given a parsed config.json, and its path for errors. Raises ConfigError."""

GROUP: Final = "tinsmith_jax.families"

_FAMILIES: Final[dict[str, Family]] = {}
_FIELDS: Final[dict[str, Mapping[str, Field] | None]] = {}


def family(class_name: str, *, fields: Mapping[str, Field] | None = None) -> Callable[[Family], Family]:
    """Register a function for models whose config.json names this architecture, such as `LlamaForCausalLM`.

    `fields`: what happens to each field of its config.json, beyond those of all decoders. None: the function sees to
    its own fields, and no field is announced as unknown.
    """

    def register(describe: Family) -> Family:
        former = _FAMILIES.setdefault(class_name, describe)
        if former is not describe:
            msg = f"{class_name} is described by {former.__module__} already, so {describe.__module__} cannot"
            raise ValueError(msg)
        _FIELDS[class_name] = fields
        return describe

    return register


def read_config(directory: Path) -> ModelConfig:
    """Read `directory`/config.json. Raise ConfigError if it is missing, broken or of an unsupported kind."""
    return config_of(read_model_config(directory), directory / "config.json")


def config_of(config: Mapping[str, Json], path: Path) -> ModelConfig:
    """Describe the decoder of a parsed config.json, of which a family sees the language part. `path`: for errors."""
    with understood(path):
        return _described(config, path)


def _described(config: Mapping[str, Json], path: Path) -> ModelConfig:
    whole, config = config, language_config(config)
    class_name = next(iter(config.get("architectures") or ["(none named)"]))
    ours = built_in()
    describe = _FAMILIES.get(class_name)
    if describe is None:
        broken = _load_others()
        describe = _FAMILIES.get(class_name)
        if describe is None:
            names = [*ours, *sorted(_FAMILIES.keys() - set(ours))]
            failed = "".join(f"; {name} could not be loaded: {error}" for name, error in broken.items())
            msg = f"{path}: architecture {class_name!r} is not supported, only {', '.join(names)}{failed}"
            raise ConfigError(msg)
    if whole is not config:
        check_whole(whole, path)
    check_config(config, path, fields_of(class_name), all_known=_FIELDS[class_name] is not None)
    return describe(config, path)


def fields_of(class_name: str) -> FileFields:
    """Return the table of config.json for a family that is registered."""
    return family_table(class_name, _FIELDS[class_name] or {})


@functools.cache
def built_in() -> tuple[str, ...]:
    """Return the architectures of this package's own families."""
    others = set(_FAMILIES)
    for module in pkgutil.iter_modules(__path__, f"{__name__}."):
        importlib.import_module(module.name)
    return tuple(sorted(_FAMILIES.keys() - others))


def _load_others() -> dict[str, Exception]:
    """Load the families of other distributions. Return the errors of those that fail."""
    broken: dict[str, Exception] = {}
    for entry in entry_points(group=GROUP):
        try:
            entry.load()
        except Exception as error:  # noqa: BLE001 - whatever a stranger's module raises
            broken[entry.value] = error
    return broken
