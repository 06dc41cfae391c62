"""The engine's side of a capture: files that the workers fill beside training, in a directory of their own."""

import fcntl
import os
import secrets
import shutil
import tempfile
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Final

import numpy as np

from tinsmith.errors import ServerError, UnsupportedError, UserError
from tinsmith.operations import Array
from tinsmith_checkpoints.huggingface.safetensors_files import ShardWriter, StoredTensors
from tinsmith_checkpoints.huggingface.state_files import Kind, Targets, lay_out, lay_out_adapter
from tinsmith_workers.group import WorkerGroup
from tinsmith_workers.program import StateProgram

SHARD_BYTES: Final = 2 << 30
_POLL_S: Final = 0.05
_LOCK: Final = ".lock"


class StateFiles:
    """A directory that the engine and all workers see.

    What it holds belongs to one engine, and ends with its readers.
    """

    def __init__(self, workers: WorkerGroup[StateProgram], directory: Path, *, shard_bytes: int = SHARD_BYTES) -> None:
        """Remove what killed engines have left in `directory`. A replay may use it beside an engine."""
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        _remove_orphans(directory)
        self.directory = directory / secrets.token_hex(4)
        lock = _locked(self.directory.with_suffix(_LOCK), os.O_CREAT | os.O_EXCL)
        assert lock is not None, "nobody else knows the name"
        weakref.finalize(self, os.close, lock)
        self.directory.mkdir(mode=0o700)
        self._workers = workers
        self._shard_bytes = shard_bytes
        self._ended: deque[str] = deque()

    def seen(self) -> list[bool]:
        """Return whether each worker sees the directory, by rank."""
        with tempfile.NamedTemporaryFile(dir=self.directory) as file:
            return self._workers.call(StateProgram.sees, Path(file.name))

    def check(self) -> None:
        """Raise UnsupportedError if a worker does not see the directory."""
        seen = self.seen()
        if not all(seen):
            member = self._workers.members[seen.index(False)]
            msg = (
                f"worker {seen.index(False)} of {len(seen)}, on {member.host}, does not see {str(self.directory)!r}, "
                "where workers write the state of a fully trained model: put server.data_dir on a file system that all "
                "machines share, or train a LoRA adapter"
            )
            raise UnsupportedError(msg)

    def capture(self, owner: str, shapes: Mapping[str, tuple[int, ...]], kinds: Iterable[Kind]) -> "Capture":
        """Make the workers write these tensors of a model. Raise ServerError if the disk has no space for the files."""
        return self._captured(owner, lambda directory: lay_out(directory, shapes, kinds, self._shard_bytes))

    def capture_adapter(self, owner: str, shapes: Mapping[str, tuple[int, ...]], kinds: Iterable[Kind]) -> "Capture":
        """Do likewise with an adapter's tensors, under their canonical names."""
        return self._captured(owner, lambda directory: lay_out_adapter(directory, shapes, kinds))

    def _captured(self, owner: str, lay_out_in: Callable[[Path], Targets]) -> "Capture":
        directory = self._new_directory()
        try:
            targets = lay_out_in(directory)
        except OSError as error:
            raise _refused(error.strerror or str(error)) from error
        ended = [self._ended.popleft() for _ in range(len(self._ended))]
        self._workers.call(StateProgram.capture, directory.name, owner, targets, ended)
        return Capture(self._workers, directory, targets, self._ended.append)

    def stored(self, what: Kind, tensors: Mapping[str, Array], shapes: Mapping[str, tuple[int, ...]]) -> StoredTensors:
        """Return tensors that lie in files which all workers see: as they are, or written to a new one, one at a time.

        Raise UserError if names or shapes are not the given ones, ServerError if the disk refuses.
        """
        _check_names(what, tensors, shapes)
        if isinstance(tensors, StoredTensors):
            tensors.wait()
            for name, shape in tensors.shapes().items():
                _check_shape(what, name, shape, shapes)
            if all(all(self._workers.call(StateProgram.sees, file)) for file in tensors.files()):
                return tensors
        directory = self._new_directory()
        try:
            with ShardWriter(directory, "tensors", list(tensors), shard_bytes=self._shard_bytes) as writer:
                for name, tensor in tensors.items():
                    _check_shape(what, name, np.shape(tensor), shapes)
                    writer.add(name, np.asarray(tensor, np.float32))
        except OSError as error:
            shutil.rmtree(directory, ignore_errors=True)
            raise _refused(error.strerror or str(error)) from error
        except BaseException:
            shutil.rmtree(directory, ignore_errors=True)
            raise
        found = StoredTensors.of(directory, "tensors")
        weakref.finalize(found, shutil.rmtree, directory, ignore_errors=True)
        return found

    def _new_directory(self) -> Path:
        try:
            return Path(tempfile.mkdtemp(dir=self.directory))
        except OSError as error:
            raise _refused(error.strerror or str(error)) from error


class Capture:
    """A state that is being written. Any thread may use it."""

    def __init__(
        self,
        workers: WorkerGroup[StateProgram],
        directory: Path,
        targets: Targets,
        on_end: Callable[[str], None],
    ) -> None:
        self.capture_id = directory.name
        self.targets = targets
        self._workers = workers
        self._waiting = threading.Lock()
        self._complete = False
        self._refusal: str | None = None
        weakref.finalize(self, _end, directory, on_end)

    def tensors(self, kind: Kind) -> StoredTensors:
        """Return the tensors of one kind, which keep the files alive."""
        return StoredTensors(self.targets[kind], wait=self.wait)

    def wait(self) -> None:
        """Return when all workers have written their parts.

        Raise ServerError if the disk refuses, WorkerDiedError if the workers are gone.
        """
        with self._waiting:
            while not self._complete and self._refusal is None:
                self._look()
        if self._refusal is not None:
            raise _refused(self._refusal)

    def _look(self) -> None:
        found = self._workers.call(StateProgram.captured, self.capture_id)
        self._refusal = next((each.refusal for each in found if each.refusal is not None), None)
        self._complete = all(each.complete for each in found)
        if not self._complete and self._refusal is None:
            time.sleep(_POLL_S)


def _remove_orphans(parent: Path) -> None:
    for path in parent.glob(f"*{_LOCK}"):
        with suppress(OSError):  # another process removes it, or it is not one of ours
            if (lock := _locked(path)) is not None:
                shutil.rmtree(path.with_suffix(""), ignore_errors=True)
                path.unlink()
                os.close(lock)


def _locked(path: Path, flags: int = 0) -> int | None:
    """Return a descriptor of the file, locked until it is closed or this process ends. None: it is locked already."""
    file = os.open(path, os.O_RDWR | os.O_NOFOLLOW | flags, 0o600)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(file)
        return None
    return file


def _end(directory: Path, on_end: Callable[[str], None]) -> None:
    on_end(directory.name)
    shutil.rmtree(directory, ignore_errors=True)


def _refused(reason: str) -> ServerError:
    return ServerError(f"the model's state could not be written to disk: {reason}")


def _check_names(what: Kind, tensors: Mapping[str, Array], shapes: Mapping[str, tuple[int, ...]]) -> None:
    names = set(tensors)
    for problem, differing in (
        ("are missing", shapes.keys() - names),
        ("do not belong to this model", names - shapes.keys()),
    ):
        if differing:
            msg = f"{what}: {min(differing)!r} and {len(differing) - 1} more {problem}"
            raise UserError(msg)


def _check_shape(what: Kind, name: str, shape: tuple[int, ...], shapes: Mapping[str, tuple[int, ...]]) -> None:
    if shape != shapes[name]:
        msg = f"{what}: {name!r} has shape {shape}; this model needs {shapes[name]}"
        raise UserError(msg)
