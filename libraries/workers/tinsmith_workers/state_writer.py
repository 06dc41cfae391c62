"""The worker's side of a capture: one thread writes this worker's slices of the state while training goes on.

The training thread calls `settle` before it changes tensors. Tensors not yet copied then go into a buffer of
bounded size; if it is full, `settle` waits until the disk has taken something from it.
"""

import os
import threading
import traceback
from collections import deque
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Final, TypeVar

import numpy as np

from tinsmith.failpoints import durable_boundary
from tinsmith.operations import FloatArray
from tinsmith_checkpoints.huggingface.safetensors_files import StoredTensor
from tinsmith_checkpoints.huggingface.state_files import Kind

_ITEM: Final = 4  # bytes of a float32

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Slice:
    """Some rows of this worker's part of one tensor."""

    kind: Kind
    target: StoredTensor
    start: int  # the first row
    columns: tuple[int, int] | None  # None: all
    num_bytes: int
    read: Callable[[], FloatArray]
    """Copies the rows to the host. Called once, by the writer's thread or by the caller of `settle`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Written:
    """How far a worker is with a capture."""

    complete: bool  # and durable
    refusal: str | None  # why the disk refuses
    num_bytes: int  # written so far


@dataclass(slots=True)
class _Capture:
    owner: str
    left: int  # slices
    files: dict[Path, int] = field(default_factory=dict)  # descriptors
    num_bytes: int = 0
    refusal: str | None = None
    failure: str | None = None  # of the program; a traceback
    complete: bool = False

    @property
    def useless(self) -> bool:
        return self.refusal is not None or self.failure is not None


_Work = tuple[_Capture, Slice]


class StateWriter:
    """Writes captures in the order in which they begin. All methods are called by one thread."""

    def __init__(self, buffer_bytes: int) -> None:
        """`buffer_bytes` bounds what is in memory between device and disk; no slice may be larger."""
        self.buffer_bytes = buffer_bytes
        self.peak_bytes = 0  # of the buffer
        self.settled_bytes = 0  # copied by the training thread, all in all
        self._captures: dict[str, _Capture] = {}
        self._changed = threading.Condition()  # guards everything below
        self._to_read: deque[_Work] = deque()
        self._to_write: deque[tuple[_Capture, Slice, FloatArray | None]] = deque()
        self._held_bytes = 0
        self._reading = False  # the writer's thread copies a slice
        self._thread: threading.Thread | None = None

    def begin(self, capture_id: str, owner: str, slices: Iterable[Slice]) -> None:
        """Write these slices. Their tensors stay as they are until the owner is settled."""
        found = list(slices)
        assert all(each.num_bytes <= self.buffer_bytes for each in found), "a slice is larger than the buffer"
        capture = _Capture(owner, left=len(found), complete=not found)
        self._captures[capture_id] = capture
        with self._changed:
            self._to_read.extend((capture, each) for each in found)
            self._changed.notify_all()
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="state", daemon=True)
            self._thread.start()

    def settle(self, owner: str, kinds: Collection[Kind]) -> None:
        """Return when nothing more is to be copied from tensors of these kinds, so that they may change."""
        for capture, slice_ in self._taken(owner, kinds):
            with self._changed:
                self._changed.wait_for(partial(self._fits, slice_))
                self._hold(slice_)
            values = None if capture.useless else slice_.read()
            with self._changed:
                self.settled_bytes += slice_.num_bytes
                self._to_write.append((capture, slice_, values))
                self._changed.notify_all()
        with self._changed:
            self._changed.wait_for(lambda: not self._reading)

    def _taken(self, owner: str, kinds: Collection[Kind]) -> list[_Work]:
        """Take from the writer's thread what it has not begun to copy."""
        taken, left = list[_Work](), deque[_Work]()
        with self._changed:
            for capture, slice_ in self._to_read:
                own = capture.owner == owner and slice_.kind in kinds
                (taken if own else left).append((capture, slice_))
            self._to_read = left
        return taken

    def forget(self, capture_ids: Iterable[str]) -> None:
        """Nobody asks for these any more; what is not written yet need not be."""
        with self._changed:
            for capture_id in capture_ids:
                capture = self._captures.pop(capture_id)
                capture.refusal = capture.refusal or "nobody waits for it"

    def written(self, capture_id: str) -> Written:
        """Say how far a capture is. Raises RuntimeError if a slice could not be copied."""
        capture = self._captures[capture_id]
        with self._changed:
            if capture.failure is not None:
                raise RuntimeError(capture.failure)
            return Written(complete=capture.complete, refusal=capture.refusal, num_bytes=capture.num_bytes)

    # the writer's thread

    def _run(self) -> None:
        while True:
            capture, slice_, values = self._next()
            if values is None:
                values = None if capture.useless else self._guarded(capture, slice_.read)
                self._end_reading()
            if values is not None:
                self._guarded(capture, partial(self._write, capture, slice_, values))
            if self._let_go(capture, slice_):
                self._guarded(capture, partial(_finish, capture))
                with self._changed:
                    capture.complete = not capture.useless

    def _next(self) -> tuple[_Capture, Slice, FloatArray | None]:
        """Wait for work. Copied rows come first, because they take memory."""
        with self._changed:
            self._changed.wait_for(lambda: self._to_write or (self._to_read and self._fits(self._to_read[0][1])))
            if self._to_write:
                return self._to_write.popleft()
            capture, slice_ = self._to_read.popleft()
            self._hold(slice_)
            self._reading = True
            return capture, slice_, None

    def _end_reading(self) -> None:
        with self._changed:
            self._reading = False
            self._changed.notify_all()

    @staticmethod
    def _write(capture: _Capture, slice_: Slice, values: FloatArray) -> None:
        target = slice_.target
        if target.file not in capture.files:
            capture.files[target.file] = os.open(target.file, os.O_WRONLY)
        file = capture.files[target.file]
        row = target.num_bytes // target.shape[0]
        offset = target.start + slice_.start * row
        if slice_.columns is None:
            _write_at(file, values, offset)
        else:
            for number, part in enumerate(values):
                _write_at(file, part, offset + number * row + slice_.columns[0] * _ITEM)

    def _let_go(self, capture: _Capture, slice_: Slice) -> bool:
        """Take it off the buffer. Return whether it was the last of its capture."""
        with self._changed:
            self._held_bytes -= slice_.num_bytes
            capture.num_bytes += slice_.num_bytes
            capture.left -= 1
            self._changed.notify_all()
            return capture.left == 0

    def _guarded(self, capture: _Capture, work: Callable[[], T]) -> T | None:
        """Keep an error for the next caller: training does not depend on the disk."""
        try:
            return work()
        except OSError as error:
            with self._changed:
                capture.refusal = error.strerror or str(error)
        except Exception:  # noqa: BLE001 - `written` raises it
            with self._changed:
                capture.failure = traceback.format_exc()
        return None

    # the buffer, under the lock

    def _fits(self, slice_: Slice) -> bool:
        return self._held_bytes + slice_.num_bytes <= self.buffer_bytes

    def _hold(self, slice_: Slice) -> None:
        self._held_bytes += slice_.num_bytes
        self.peak_bytes = max(self.peak_bytes, self._held_bytes)


@durable_boundary("worker.write_state")
def _finish(capture: _Capture) -> None:
    """Make what was written durable."""
    try:
        if not capture.useless:
            for file in capture.files.values():
                os.fsync(file)
    finally:
        for file in capture.files.values():
            os.close(file)


def _write_at(file: int, values: FloatArray, offset: int) -> None:
    left = np.ascontiguousarray(values, "<f4").reshape(-1).view(np.uint8).data
    while left:
        count = os.pwrite(file, left, offset)
        left, offset = left[count:], offset + count
