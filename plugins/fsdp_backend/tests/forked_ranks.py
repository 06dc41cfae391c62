"""Ranks that start at once: forked from a process that has imported torch and transformers.

The shipped launcher imports torch in its agent and again in every rank, which takes longer than most tests. Here, what
is started is the same program, `tinsmith_fsdp.rank`, in processes of its own; only the agent is left out. The ranks of
`two_ranks`, which most tests share, are started by the shipped launcher.

Run as a program, this module is the process that forks. It reads requests as lines of JSON from its standard input and
answers each with a line. When its standard input closes, it kills its ranks and exits.
"""

import atexit
import contextlib
import gc
import json
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest

_STOP_S = 60.0


class ForkedRanks:
    """A launcher: see `tinsmith_fsdp.launchers`."""

    def __init__(self, count: int, environment: Mapping[str, str]) -> None:
        self._meeting, *self._ranks = _ask("start", count, dict(environment))

    def ended(self) -> str | None:
        ended = _ask("ended", self._ranks)
        return f"forked ranks left with {ended}" if ended else None

    def close(self) -> None:
        _ask("end", self._meeting, self._ranks)


@contextlib.contextmanager
def forking() -> Iterator[None]:
    """Start the ranks of all backends that are made until the block ends by forking."""
    from tinsmith_fsdp import ranks

    def start(config: Any, environment: Mapping[str, str], directory: Path) -> ForkedRanks:
        return ForkedRanks(config.nproc_per_node or 1, environment)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ranks, "start", start)
        yield


@cache
def _nursery() -> "subprocess.Popen[str]":
    # glibc reserves 64 MiB of address space for each further arena; test_fsdp_memory.py counts address space
    environment = {**os.environ, "MALLOC_ARENA_MAX": "1", "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    process = subprocess.Popen(
        [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
    )
    atexit.register(process.wait)
    assert process.stdin is not None
    atexit.register(process.stdin.close)  # the last registered is called first
    return process


def _ask(*request: Any) -> Any:
    process = _nursery()
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(json.dumps(request) + "\n")
    process.stdin.flush()
    return json.loads(process.stdout.readline())


# The process that forks ----------------------------------------------------------------------------------------------


def main() -> None:
    _import_everything()
    children: set[int] = set()
    for line in sys.stdin:
        what, *arguments = json.loads(line)
        answer = {"start": _start, "ended": _ended, "end": _end}[what](children, *arguments)
        print(json.dumps(answer), flush=True)
    for pid in children:
        os.kill(pid, signal.SIGKILL)
    os._exit(0)


def _import_everything() -> None:
    gc.disable()
    import transformers

    import tinsmith_fsdp.rank

    for name in ("AutoConfig", "Qwen3ForCausalLM", "LlamaForCausalLM"):  # transformers imports its models when asked
        getattr(transformers, name)
    del tinsmith_fsdp
    gc.collect()
    gc.freeze()
    gc.enable()


def _start(children: set[int], count: int, environment: Mapping[str, str]) -> list[int]:
    """Fork the process of the store at which ranks meet, and the ranks."""
    reading, writing = os.pipe()
    meeting = _fork(lambda: _host_store(writing))
    os.close(writing)
    with os.fdopen(reading) as answers:
        port = answers.readline().strip()
    shared = {
        **environment,
        "WORLD_SIZE": str(count),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
    }
    pids = [_fork(partial(_be_rank, shared, rank)) for rank in range(count)]
    children |= {meeting, *pids}
    return [meeting, *pids]


def _host_store(writing: int) -> None:
    from torch.distributed import TCPStore

    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    os.write(writing, f"{store.port}\n".encode())
    os.close(writing)
    signal.pause()


def _be_rank(shared: Mapping[str, str], rank: int) -> None:
    from tinsmith_fsdp import rank as program

    os.environ.update(shared, RANK=str(rank), LOCAL_RANK=str(rank))
    program.main()


def _fork(body: Callable[[], None]) -> int:
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        os.setsid()
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(2, 1)  # standard output is for answers
        body()
        code = 0
    except SystemExit as leaving:
        code = leaving.code if isinstance(leaving.code, int) else 1
    except BaseException:  # noqa: BLE001 - the process ends with it
        traceback.print_exc()
    finally:
        os._exit(code)


def _ended(children: set[int], pids: list[int]) -> list[int]:
    """Return the wait statuses of those that have ended."""
    found = [os.waitpid(pid, os.WNOHANG) for pid in pids if pid in children]
    children -= {pid for pid, _ in found}
    return [status for pid, status in found if pid]


def _end(children: set[int], meeting: int, ranks: list[int]) -> None:
    """Wait for the ranks, whose connections are closed. Kill what is left, at least the store."""
    deadline = time.monotonic() + _STOP_S
    while children & set(ranks) and time.monotonic() < deadline:
        _ended(children, ranks)
        time.sleep(0.01)
    for pid in children & {meeting, *ranks}:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        children.discard(pid)


if __name__ == "__main__":
    main()
