"""The process of one rank: connects to the engine, loads its part of the model, and answers calls until told to end.

It never outlives the engine: when the connection closes, the process exits at once, whatever it is doing.
"""

import ctypes
import gc
import os
import queue
import signal
import socket
import sys
import threading
import traceback
import warnings
from collections.abc import Iterator
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge
from typing import Final

import torch
import torch.distributed as dist

from tinsmith import ConfigError
from tinsmith_fsdp.base_model import BaseModel
from tinsmith_fsdp.environment import CONTROL, DEVICE, KEY
from tinsmith_fsdp.mesh import find_device, make_mesh
from tinsmith_fsdp.messages import Answer, Call, Hello, Loaded, Part, ProgressMade, RankFailed, Setup
from tinsmith_fsdp.trainer import Trainer

_PR_SET_PDEATHSIG: Final = 1


def main() -> None:
    """Run with the settings of the launcher's environment variables (RANK, WORLD_SIZE, MASTER_ADDR, ...)."""
    _die_with_parent()
    serve(os.environ[CONTROL], bytes(os.environ[KEY], "ascii"))
    os._exit(0)  # nothing is left to clean up, and the interpreter's shutdown is slow


def serve(address: str, key: bytes) -> None:
    """Answer the engine at `address` until it asks the rank to end."""
    device = find_device(os.environ.get(DEVICE))
    connection = _connect(address, key)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU rank"
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    connection.send(Hello(rank=rank, world_size=world_size, pid=os.getpid(), device_type=device.type, device_name=name))
    calls: queue.SimpleQueue[Call | None] = queue.SimpleQueue()
    served = threading.Event()
    threading.Thread(target=_read, args=(connection, calls, served), name="calls", daemon=True).start()
    worker = Worker(connection, device)
    while (call := calls.get()) is not None:
        try:
            worker.answer(call)
        except Exception as error:  # noqa: BLE001  (told to the engine, which ends all ranks)
            config = isinstance(error, ConfigError)
            connection.send(RankFailed(str(error) if config else traceback.format_exc(), config))
            sys.exit(1)
    if dist.is_initialized():
        dist.barrier()  # a rank that leaves early would look dead
    served.set()
    with socket.socket(fileno=os.dup(connection.fileno())) as end:
        end.shutdown(socket.SHUT_RDWR)  # the engine and the reader thread wait for this


class Worker:
    """Dispatches calls to the trainer's methods."""

    def __init__(self, connection: Connection, device: torch.device) -> None:
        self._connection = connection
        self._device = device
        self._trainer: Trainer | None = None

    def answer(self, call: Call) -> None:
        if call.method == "load":
            self._connection.send(Answer(self._load(*call.arguments)))
            return
        value = getattr(self._trainer, call.method)(*call.arguments)
        if isinstance(value, Iterator):
            for part in value:
                self._connection.send(Part(part))
            value = None
        self._connection.send(Answer(value))

    def _load(self, setup: Setup) -> Loaded:
        torch.use_deterministic_algorithms(mode=True, warn_only=True)
        warnings.filterwarnings("ignore", message=".*deterministic", category=UserWarning)
        mesh = make_mesh(self._device, setup.config.tensor_parallel)
        rank = dist.get_rank()

        def report(fraction: float) -> None:
            if rank == 0:
                self._connection.send(ProgressMade("loading weights", fraction))

        base = BaseModel(setup, mesh)
        base.load(report)
        self._trainer = Trainer(base, mesh, setup)
        gc.collect()
        gc.freeze()  # what imports and loading made stays: later collections need not look at it
        return base.loaded()


def _read(connection: Connection, calls: "queue.SimpleQueue[Call | None]", served: threading.Event) -> None:
    """Read calls from the connection. When it closes, exit, even if the main thread is waiting for a dead rank."""
    try:
        while True:
            message: Call | None = connection.recv()
            calls.put(message)
    except (EOFError, OSError):
        if not served.is_set():
            os._exit(1)


def _connect(address: str, key: bytes) -> Connection:
    kind, _, where = address.partition(":")
    if kind == "unix":
        peer = socket.socket(socket.AF_UNIX)
        peer.connect(where)
    else:
        host, _, port = where.rpartition(":")
        peer = socket.create_connection((host, int(port)))
    connection = Connection(peer.detach())
    answer_challenge(connection, key)
    deliver_challenge(connection, key)
    return connection


def _die_with_parent() -> None:
    """Exit if the elastic agent is killed: nothing else ends this process before the connection closes."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


if __name__ == "__main__":
    main()
