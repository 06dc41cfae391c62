"""The files of a model's training state, laid out before anything is written to them.

Several processes can then write their own parts of the same files.
"""

import math
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Final, Literal

from tinsmith_checkpoints.huggingface.safetensors_files import StoredTensor, encode_header, shard_name, write_index
from tinsmith_checkpoints.values import Json

Kind = Literal["weights", "adam_m", "adam_v", "gradients"]
"""The tensors of a model's training state, as ModelState names them."""

MODEL, ADAPTER, OPTIMIZER, GRADIENTS = "model", "adapter_model", "optimizer", "gradients"
M_PREFIX, V_PREFIX = "adam_m.", "adam_v."
FILES: Final[Mapping[str, Mapping[Kind, str]]] = {
    MODEL: {"weights": ""},
    OPTIMIZER: {"adam_m": M_PREFIX, "adam_v": V_PREFIX},
    GRADIENTS: {"gradients": ""},
}
"""By the stem of the file names: which tensors the files hold, and how their names begin there."""
ADAPTER_FILES: Final[Mapping[str, Mapping[Kind, str]]] = {
    ADAPTER: {"weights": ""},
    OPTIMIZER: FILES[OPTIMIZER],
    GRADIENTS: FILES[GRADIENTS],
}
"""Likewise for an adapter, which has one file of each, as PEFT wants it."""

_ITEM: Final = 4  # bytes of a float32

Targets = Mapping[Kind, Mapping[str, StoredTensor]]
"""Where each tensor belongs."""


def lay_out(directory: Path, shapes: Mapping[str, tuple[int, ...]], kinds: Iterable[Kind], shard_bytes: int) -> Targets:
    """Create the files: header, index and room for the tensors, which take no space on the disk yet."""
    wanted, targets = set(kinds), dict[Kind, dict[str, StoredTensor]]()
    for stem, prefixes in FILES.items():
        tensors = [(kind, name) for kind in prefixes if kind in wanted for name in sorted(shapes)]
        shards = list(_shards(tensors, shapes, shard_bytes))
        weight_map: dict[str, str] = {}
        for number, shard in enumerate(shards):
            file = directory / shard_name(stem, number, len(shards))
            for (kind, name), tensor in zip(shard, _created(file, shard, shapes, prefixes), strict=True):
                targets.setdefault(kind, {})[name] = tensor
                weight_map[tensor.name] = file.name
        if shards:
            write_index(directory, stem, weight_map, sum(_num_bytes(shapes[name]) for _, name in tensors))
    return targets


def lay_out_adapter(directory: Path, shapes: Mapping[str, tuple[int, ...]], kinds: Iterable[Kind]) -> Targets:
    """Do likewise for an adapter, without an index."""
    wanted, targets = set(kinds), dict[Kind, dict[str, StoredTensor]]()
    for stem, prefixes in ADAPTER_FILES.items():
        tensors = [(kind, name) for kind in prefixes if kind in wanted for name in shapes]
        if tensors:
            created = _created(directory / f"{stem}.safetensors", tensors, shapes, prefixes)
            for (kind, name), tensor in zip(tensors, created, strict=True):
                targets.setdefault(kind, {})[name] = tensor
    return targets


def _shards(
    tensors: Iterable[tuple[Kind, str]], shapes: Mapping[str, tuple[int, ...]], shard_bytes: int
) -> Iterator[list[tuple[Kind, str]]]:
    """Divide the tensors over files of at most `shard_bytes`; a larger tensor gets a file of its own."""
    shard, end = list[tuple[Kind, str]](), 0
    for kind, name in tensors:
        size = _num_bytes(shapes[name])
        if end and end + size > shard_bytes:
            yield shard
            shard, end = [], 0
        shard.append((kind, name))
        end += size
    if shard:
        yield shard


def _created(
    file: Path, shard: Iterable[tuple[Kind, str]], shapes: Mapping[str, tuple[int, ...]], prefixes: Mapping[Kind, str]
) -> Iterator[StoredTensor]:
    entries: dict[str, Json] = {}
    end = 0
    for kind, name in shard:
        size = _num_bytes(shapes[name])
        entries[prefixes[kind] + name] = {
            "dtype": "F32",
            "shape": list(shapes[name]),
            "data_offsets": [end, end + size],
        }
        end += size
    head = encode_header(entries)
    with file.open("wb") as opened:
        opened.write(head)
        opened.truncate(len(head) + end)
    for name, entry in entries.items():
        start, stop = entry["data_offsets"]
        yield StoredTensor(
            name=name,
            file=file,
            dtype="F32",
            shape=tuple(entry["shape"]),
            start=len(head) + start,
            num_bytes=stop - start,
        )


def _num_bytes(shape: tuple[int, ...]) -> int:
    return math.prod(shape) * _ITEM
