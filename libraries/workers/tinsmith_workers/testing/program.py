"""The program of the workers of `WorkersContract`. It imports only modules that every worker needs."""

import ctypes
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np

from tinsmith import failpoints
from tinsmith.errors import ConfigError
from tinsmith.operations import Array, FloatArray
from tinsmith_checkpoints.huggingface import Kind, StoredTensor, Targets
from tinsmith_workers import Slice, StateProgram, StateWriter, Worker, Written

FAILURE: Final = "_TINSMITH_TEST_FAILURE"
"""Environment variable, "<rank>:<specification of failpoints>": what one worker arms as soon as it knows its rank."""


class Program(StateProgram):
    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        rank, _, failure = os.environ.get(FAILURE, "").partition(":")
        if rank == str(worker.rank):
            failpoints.arm(failure)
        self._state_writer = StateWriter(1 << 20)
        self._added = np.zeros(1, np.float32)  # to every number of the state

    def place(self) -> dict[str, Any]:
        worker = self._worker
        return {
            "rank": worker.rank,
            "num_workers": worker.num_workers,
            "local_rank": worker.local_rank,
            "local_size": worker.local_size,
            "meeting": worker.meeting,
            "keeps_port": worker.meeting_socket is not None and worker.meeting_socket.getsockname()[1],
        }

    def echo(self, *values: Any) -> tuple[Any, ...]:
        return values

    def scribble(self, array: Array) -> tuple[float, Array]:
        """Return the sum as received; then overwrite what was received."""
        before = float(array.sum())
        array[...] = self._worker.rank
        return before, array

    def work(self, stages: int) -> None:
        for stage in range(stages):
            self._worker.report("working", stage / stages)

    def misconfigured(self, rank: int) -> None:
        if self._worker.rank == rank:
            msg = f"the value of rank {rank} is wrong"
            raise ConfigError(msg)

    def broken(self, rank: int) -> None:
        if self._worker.rank == rank:
            msg = "a bug"
            raise ZeroDivisionError(msg)

    # a state whose rows are divided over the workers

    def sees(self, file: Path) -> bool:
        return file.exists()

    def capture(self, capture_id: str, owner: str, targets: Targets, ended: Sequence[str]) -> None:
        self._state_writer.forget(ended)
        slices = [self._own(kind, each) for kind, tensors in targets.items() for each in tensors.values()]
        self._state_writer.begin(capture_id, owner, slices)

    def captured(self, capture_id: str) -> Written:
        return self._state_writer.written(capture_id)

    def train(self, owner: str) -> None:
        self._state_writer.settle(owner, ("weights", "adam_m", "adam_v", "gradients"))
        self._added += 1

    def _own(self, kind: Kind, target: StoredTensor) -> Slice:
        rows = np.array_split(state_tensor(target.name, target.shape), self._worker.num_workers)
        own, start = rows[self._worker.rank], sum(map(len, rows[: self._worker.rank]))
        return Slice(
            kind=kind,
            target=target,
            start=start,
            columns=None,
            num_bytes=own.nbytes,
            read=lambda: own + self._added,
        )

    def hold_the_interpreter(self) -> None:
        """As native code may that computes for an hour."""
        ctypes.PyDLL(None).sleep(3600)

    def hang(self, except_rank: int) -> None:
        """Wait for nothing, as a collective does when another worker has died."""
        if self._worker.rank != except_rank:
            import threading

            threading.Event().wait()


def state_tensor(name: str, shape: tuple[int, ...]) -> FloatArray:
    """Return a tensor of the state, as it is before it was trained. `name` is that in the files."""
    drawn: FloatArray = np.random.default_rng(list(name.encode())).normal(size=shape).astype(np.float32)
    return drawn


class Misconfigured:
    def __init__(self, worker: Worker) -> None:
        if worker.rank == worker.num_workers - 1:
            msg = "this program cannot be made"
            raise ConfigError(msg)
