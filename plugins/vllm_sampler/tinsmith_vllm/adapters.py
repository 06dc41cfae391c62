"""Adapters in the form that vLLM reads: one PEFT directory per loaded snapshot, in shared memory."""

import fcntl
import json
import shutil
import tempfile
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import IO, Final

import numpy as np
from safetensors.numpy import save_file

from tinsmith import Snapshot
from tinsmith.huggingface import adapter_config

_SHARED_MEMORY: Final = Path("/dev/shm")
_PREFIX: Final = "tinsmith-vllm-"
_LOCK: Final = "owner.lock"


class AdapterFiles:
    """A private directory of this process. At the start, it removes the leftovers of killed processes."""

    def __init__(self, configured: Path | None, fallback: Path) -> None:
        parent = configured or (_SHARED_MEMORY if _SHARED_MEMORY.is_dir() else fallback)
        parent.mkdir(parents=True, exist_ok=True)
        _remove_orphans(parent)
        self._root = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=parent))
        self._lock = _locked(self._root / _LOCK)
        self._ids = count(1)  # never reused: vLLM's caches are keyed by it

    def write(self, snapshot: Snapshot, base_model: str) -> tuple[int, Path]:
        """Return a new id and the directory. Copies the weights to the host if they are on the trainer's device."""
        weights = snapshot.adapter_weights()
        adapter_id = next(self._ids)
        directory = self._root / str(adapter_id)
        directory.mkdir()
        arrays = {name: np.ascontiguousarray(array, np.float32) for name, array in weights.items()}
        save_file(arrays, directory / "adapter_model.safetensors")
        config = adapter_config(base_model, snapshot.lora, weights)
        (directory / "adapter_config.json").write_text(json.dumps(config), encoding="utf-8")
        return adapter_id, directory

    def remove(self, directory: Path) -> None:
        shutil.rmtree(directory, ignore_errors=True)

    def close(self) -> None:
        shutil.rmtree(self._root, ignore_errors=True)
        if self._lock is not None:
            self._lock.close()


def _remove_orphans(parent: Path) -> None:
    for directory in parent.glob(f"{_PREFIX}*"):
        with suppress(OSError):  # another user's
            if (lock := _locked(directory / _LOCK)) is not None:
                shutil.rmtree(directory, ignore_errors=True)
                lock.close()


def _locked(path: Path) -> IO[bytes] | None:
    """Return the file, locked while it is open, or None if another process holds the lock."""
    lock = path.open("ab")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        lock.close()
        return None
    return lock
