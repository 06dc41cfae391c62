"""A process that ends together with the one that has started it, whatever it is doing."""

import fcntl
import os
import select
import signal
import sys
import threading
from contextlib import suppress
from typing import Final

_F_SETSIG: Final = 10  # of Linux; Python has no name for it


def end_with(pipe: int) -> None:
    """Kill this process when the other end of a pipe or a socket closes. Nobody may write there.

    On Linux the kernel does so, even while native code holds the interpreter. Elsewhere a thread must get a turn.
    """
    if sys.platform == "linux":
        with suppress(OSError):  # a sandbox may not know these calls
            fcntl.fcntl(pipe, _F_SETSIG, signal.SIGKILL)
            fcntl.fcntl(pipe, fcntl.F_SETOWN, os.getpid())
            fcntl.fcntl(pipe, fcntl.F_SETFL, fcntl.fcntl(pipe, fcntl.F_GETFL) | os.O_ASYNC)
    if _has_ended(pipe, timeout_ms=0):  # before the kernel was asked
        os._exit(1)
    threading.Thread(target=_watch, args=(pipe,), name="lifeline", daemon=True).start()


def _watch(pipe: int) -> None:
    while not _has_ended(pipe):
        pass
    os._exit(1)


def _has_ended(pipe: int, timeout_ms: int | None = None) -> bool:
    """Wait for the end, by default for ever. Never read: while somebody reads a socket, the kernel sends no signal."""
    poll = select.poll()
    poll.register(pipe, 0)  # an end is always reported
    return bool(poll.poll(timeout_ms))
