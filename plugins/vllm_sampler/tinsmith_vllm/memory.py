"""Adapters in memory that this process and the vLLM processes map. No file system has them, nor sets their limit.

Each is a memory file (memfd_create) in the layout of safetensors, with what else is to be known in its metadata. vLLM's
processes and their workers open it by its place in /proc, as long as this process keeps it open. It vanishes with the
last process that maps it, however these end.
"""

import json
import math
import mmap
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

import numpy as np

from tinsmith import Array, ServerError, Snapshot
from tinsmith_checkpoints.huggingface import Place, adapter_config
from tinsmith_vllm.adapters import arrays_of, changes_of
from tinsmith_vllm.messages import CHANGES, CONFIG

_DESCRIPTORS: Final = Path("/proc/self/fd")
_ALIGNMENT: Final = 64


class AdapterMemory:
    """Loaded adapters, by the path that is told to vLLM."""

    def __init__(self, ids: Iterator[int]) -> None:
        self._ids = ids
        self.open: dict[Path, int] = {}  # their descriptors

    @staticmethod
    def is_available() -> bool:
        """Linux has it; elsewhere adapters are passed on in files."""
        return hasattr(os, "memfd_create") and _DESCRIPTORS.is_dir()

    def write(self, snapshot: Snapshot, base_model: str) -> tuple[int, Path]:
        """Return a new id and the path. Copies the weights from wherever they are; the snapshot then keeps this copy.

        Raise ServerError if the system refuses more memory or open files.
        """
        arrays = arrays_of(snapshot)
        config = adapter_config(base_model, snapshot.lora, arrays)
        return self._put(snapshot, arrays, {CONFIG: json.dumps(config)})

    def write_changes(self, snapshot: Snapshot, base: Mapping[str, Place]) -> tuple[int, Path]:
        """Do as `write`, for merging. `base` has the places of the base model's weights.

        Raise UnsupportedError if the adapter does not fit them.
        """
        arrays = arrays_of(snapshot)
        return self._put(snapshot, arrays, {CHANGES: json.dumps(changes_of(snapshot, arrays, base))})

    def _put(self, snapshot: Snapshot, arrays: Mapping[str, Array], metadata: Mapping[str, str]) -> tuple[int, Path]:
        adapter_id = next(self._ids)
        descriptor = -1
        try:
            descriptor = os.memfd_create(f"tinsmith-adapter-{adapter_id}")
            kept = write_tensors(descriptor, arrays, metadata)
        except OSError as error:
            if descriptor >= 0:
                os.close(descriptor)
            size = sum(array.nbytes for array in arrays.values()) / 2**20
            msg = (
                f"no room for snapshot {snapshot.snapshot_id!r} in memory beside {len(self.open)} others: it takes "
                f"{size:.1f} MiB ({error.strerror}); lower the model's resident_snapshot_bytes or resident_snapshots, "
                "give the container more memory, raise the limit of open files (ulimit -n), or set the sampler's "
                "shared_memory_dir to a directory on a disk"
            )
            raise ServerError(msg) from error
        path = Path(f"/proc/{os.getpid()}/fd/{descriptor}")
        self.open[path] = descriptor
        snapshot.keep_in(kept)
        return adapter_id, path

    def remove(self, path: Path) -> None:
        os.close(self.open.pop(path))

    def close(self) -> None:
        for path in list(self.open):
            self.remove(path)


def write_tensors(descriptor: int, arrays: Mapping[str, Array], metadata: Mapping[str, str]) -> dict[str, Array]:
    """Fill an empty file with contiguous float32 arrays, as safetensors. Return read-only views of the file.

    Raise OSError if there is no room.
    """
    head, starts, size = _layout(arrays, metadata)
    os.posix_fallocate(descriptor, 0, size)
    with open(descriptor, "wb", closefd=False) as file:  # a mapping would fault at every page, and take twice as long
        file.write(head)
        for array in arrays.values():
            file.write(array.data)
    memory = mmap.mmap(descriptor, size, access=mmap.ACCESS_READ)
    return {
        name: np.frombuffer(memory, np.float32, array.size, starts[name]).reshape(array.shape)
        for name, array in arrays.items()
    }


def _layout(arrays: Mapping[str, Array], metadata: Mapping[str, str]) -> tuple[bytes, dict[str, int], int]:
    """Return the head of the file, where each array starts, and the file's size."""
    header: dict[str, object] = {"__metadata__": dict(metadata)}
    starts, end = dict[str, int](), 0
    for name, array in arrays.items():
        start, end = end, end + math.prod(array.shape) * np.dtype(np.float32).itemsize
        header[name] = {"dtype": "F32", "shape": list(array.shape), "data_offsets": [start, end]}
        starts[name] = start
    text = json.dumps(header).encode()
    text += b" " * (-(8 + len(text)) % _ALIGNMENT)
    head = len(text).to_bytes(8, "little") + text
    return head, {name: len(head) + start for name, start in starts.items()}, len(head) + end
