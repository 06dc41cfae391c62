"""Makes a base model of 8-bit integers from any other, in the layout of compressed-tensors' scheme W8A16."""

import copy
import json
import shutil
from pathlib import Path
from typing import Final

import numpy as np
from safetensors.numpy import load_file, save_file

from tinsmith.operations import Array
from tinsmith_checkpoints.huggingface import ATTENTION, MLP
from tinsmith_checkpoints.huggingface.int8 import PACKED, SCALE, SHAPE, W8A16
from tinsmith_checkpoints.values import Json

_MATRICES: Final = tuple(f".{path}.weight" for path in (*ATTENTION, *MLP))
_OF_EXPERT: Final = (".gate_proj.weight", ".up_proj.weight", ".down_proj.weight")


def int8_config(group_size: int | None = None) -> dict[str, Json]:
    """Return the quantization_config of a model with a scale per `columns` columns of a row (None: per row)."""
    config = copy.deepcopy(W8A16)
    strategy = "channel" if group_size is None else "group"
    config["config_groups"]["group_0"]["weights"] |= {"strategy": strategy, "group_size": group_size}
    return config


def write_int8_model(source: Path, int8: Path, plain: Path | None = None, *, group_size: int | None = None) -> None:
    """Write to `int8` the model in `source` (float32, in one file) with integers in place of the layers' matrices.

    Experts are quantised, routers and the head are not. To `plain`, if given, goes the same model unquantised: float32
    numbers that are equal to those the integers stand for.
    """
    integers: dict[str, Array] = {}
    numbers: dict[str, Array] = {}
    for name, weight in load_file(source / "model.safetensors").items():
        numbers[name] = weight
        if name.endswith(_MATRICES) or (".experts." in name and name.endswith(_OF_EXPERT)):
            each = group_size or weight.shape[1]
            grouped = weight.reshape(len(weight), -1, each)
            scale = (np.abs(grouped).max(axis=2) / 127.5).astype(np.float32)
            rounded = np.clip(np.rint(grouped / scale[..., None]), -128, 127).astype(np.int8)
            numbers[name] = (rounded.astype(np.float32) * scale[..., None]).reshape(weight.shape)
            integers |= {f"{name}{PACKED}": _packed(rounded.reshape(weight.shape)), f"{name}{SCALE}": scale}
            integers[f"{name}{SHAPE}"] = np.array(weight.shape, np.int64)
        else:
            integers[name] = weight
    _write(source, int8, integers, {"quantization_config": int8_config(group_size)})
    if plain is not None:
        _write(source, plain, numbers, {})


def _packed(rounded: Array) -> Array:
    """Return four integers in each int32, the first in its lowest bits, padded with zeros."""
    stored = (rounded.astype(np.int16) + 128).astype(np.uint8)
    padded = np.pad(stored, ((0, 0), (0, -stored.shape[1] % 4)))
    return padded.view("<i4")


def _write(source: Path, target: Path, tensors: dict[str, Array], changes: dict[str, Json]) -> None:
    shutil.copytree(source, target, ignore=shutil.ignore_patterns("*.safetensors"))
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    (target / "config.json").write_text(json.dumps({**config, **changes}, indent=2), encoding="utf-8")
