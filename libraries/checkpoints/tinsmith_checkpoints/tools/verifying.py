"""`tinsmith checkpoint verify`: lists every fault of a checkpoint, one per line. Reads one tensor at a time."""

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import numpy as np

from tinsmith_checkpoints import format as checkpoints
from tinsmith_checkpoints.errors import TinsmithError
from tinsmith_checkpoints.huggingface import peft_layout
from tinsmith_checkpoints.huggingface.adapter_shapes import AdaptedModule, adapted_modules
from tinsmith_checkpoints.huggingface.decoder import HEAD
from tinsmith_checkpoints.huggingface.model_files import read_model_config
from tinsmith_checkpoints.huggingface.places import weight_places
from tinsmith_checkpoints.huggingface.safetensors_files import StoredTensor, StoredTensors
from tinsmith_checkpoints.huggingface.state_files import M_PREFIX as _M
from tinsmith_checkpoints.huggingface.state_files import V_PREFIX as _V
from tinsmith_checkpoints.tools.contents import Contents

Progress = Callable[[str], None]
"""Called with the name of each file or tensor before it is read."""


def faults(contents: Contents, base: Path | None, progress: Progress) -> Iterator[str]:
    """Yield each fault. `base`: the base model's directory; the names and shapes of its tensors are compared.

    Raise as `StoredTensors.of` if they cannot be read.
    """
    yield from _files(contents, progress)
    yield from _names(contents, base)
    yield from _moments(contents)
    for what, tensors in (
        ("weights", contents.weights),
        ("optimizer", contents.optimizer),
        ("gradients", contents.gradients),
    ):
        for name in tensors:
            progress(name)
            yield from _values(what, name, tensors)


def _files(contents: Contents, progress: Progress) -> Iterator[str]:
    if contents.manifest is None:
        return
    for name, expected in contents.manifest.files.items():
        progress(name)
        path = contents.directory / name
        if not path.is_file() or path.is_symlink():
            yield f"{name}: is missing, or not a plain file"
            continue
        size = path.stat().st_size  # a file with a hole may take hours to read
        if size != expected.size:
            yield f"{name}: has {size} bytes, {checkpoints.MANIFEST} says {expected.size}"
            continue
        actual = checkpoints.describe(path)
        if actual.sha256 != expected.sha256:
            yield f"{name}: its SHA-256 is {actual.sha256}, {checkpoints.MANIFEST} says {expected.sha256}"
    listed = {*contents.manifest.files, checkpoints.MANIFEST}
    for file in sorted(contents.directory.iterdir()):
        if file.name not in listed:
            yield f"{file.name}: is not listed in {checkpoints.MANIFEST}"


def _names(contents: Contents, base: Path | None) -> Iterator[str]:
    tensors = None if base is None else StoredTensors.of(base, "model")
    if contents.layout == "model":
        if tensors is not None:
            yield from _against_model(contents.weights, tensors)
        return
    rank = contents.manifest.lora.rank if contents.manifest is not None else contents.adapter_config.get("r")
    modules = {} if base is None or tensors is None else _modules(base, tensors)
    for name, tensor in contents.weights.stored.items():
        try:
            module, side = peft_layout.parse(name)
        except TinsmithError as error:
            yield f"weights: {error}"
            continue
        axis = -2 if side == "A" else -1
        if len(tensor.shape) not in (2, 3) or tensor.shape[axis] != rank:
            yield f"weights: {name} has the shape {list(tensor.shape)}; rank {rank} needs it at axis {axis}"
        other = name.replace(f".lora_{side}.", f".lora_{'B' if side == 'A' else 'A'}.")
        if other not in contents.weights:
            yield f"weights: {name} has no {other.rsplit('.', 2)[1]} beside it"
        if base is not None:
            yield from _against_module(name, module, side, tensor, modules)


def _modules(base: Path, tensors: StoredTensors) -> dict[str, AdaptedModule]:
    places = weight_places(read_model_config(base), tensors.shapes())
    return adapted_modules({name: place.shape for name, place in places.items()})


def _against_module(
    name: str, module: str, side: peft_layout.Side, tensor: StoredTensor, base: Mapping[str, AdaptedModule]
) -> Iterator[str]:
    module = HEAD if module == peft_layout.TINKER_HEAD else module
    if module not in base:
        yield f"weights: {name}: the base model has no {module}.weight"
        return
    expected = base[module].shape(side, rank=tensor.shape[-2 if side == "A" else -1])
    if tensor.shape != expected:
        yield f"weights: {name} has the shape {list(tensor.shape)}; {module} of the base model needs {list(expected)}"


def _against_model(weights: StoredTensors, base: StoredTensors) -> Iterator[str]:
    for name in sorted(base.stored.keys() | weights.stored.keys()):
        if name not in weights:
            yield f"weights: {name} of the base model is missing"
        elif name not in base:
            yield f"weights: the base model has no {name}"
        elif weights.stored[name].shape != base.stored[name].shape:
            ours, theirs = list(weights.stored[name].shape), list(base.stored[name].shape)
            yield f"weights: {name} has the shape {ours}, in the base model {theirs}"


def _moments(contents: Contents) -> Iterator[str]:
    optimizer = contents.optimizer
    if contents.gradients:
        yield from _beside("gradients", contents.gradients, contents.weights)
    if optimizer:
        yield from _beside("adam_m", optimizer.renamed(_M), contents.weights)
        yield from _beside("adam_v", optimizer.renamed(_V), contents.weights)
        for name in optimizer:
            if not name.startswith((_M, _V)):
                yield f"optimizer: {name} is neither {_M}... nor {_V}..."
    manifest = contents.manifest
    if manifest is not None and manifest.kind == "training" and (manifest.step > 0) != bool(optimizer):
        yield f"optimizer: step is {manifest.step}, and there are {'moments' if optimizer else 'no moments'}"


def _beside(what: str, tensors: StoredTensors, weights: StoredTensors) -> Iterator[str]:
    """Every weight has one of the same shape."""
    ours, theirs = tensors.shapes(), weights.shapes()
    for name in sorted(ours.keys() | theirs.keys()):
        if name not in ours or name not in theirs:
            yield f"{what}: {name} is {'missing' if name in theirs else 'of no weight'}"
        elif ours[name] != theirs[name]:
            yield f"{what}: {name} has the shape {list(ours[name])}, its weight {list(theirs[name])}"


def _values(what: str, name: str, tensors: StoredTensors) -> Iterator[str]:
    try:
        array = tensors[name]
    except TinsmithError as error:
        yield f"{what}: {error}"
        return
    bad = int(np.count_nonzero(~np.isfinite(array)))
    if bad:
        yield f"{what}: {name} holds {bad} values that are not finite"
    if what == "optimizer" and name.startswith(_V) and (array < 0).any():
        yield f"optimizer: {name} holds {int((array < 0).sum())} negative values; a second moment has none"
