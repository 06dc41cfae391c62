"""Ties processes to a pipe, so that they end when the holder of its other end does. Standard library alone, and little.

`python -I -S tether.py PROGRAM [ARGUMENT ...]` ties its process group to its standard input, and becomes the program.
"""

import fcntl
import os
import select
import signal
import sys
from contextlib import suppress

_F_SETSIG = 10  # of Linux; Python has no name for it


def tie(pipe: int, number: signal.Signals, owner: int) -> None:
    """Have the kernel send the signal when the other end closes: to a process, or if negative, to a group.

    Linux only. It lasts as long as somebody holds this end, whatever program that becomes.
    """
    if sys.platform == "linux":
        with suppress(OSError):  # a sandbox may not know these calls
            fcntl.fcntl(pipe, _F_SETSIG, number)
            fcntl.fcntl(pipe, fcntl.F_SETOWN, owner)
            fcntl.fcntl(pipe, fcntl.F_SETFL, fcntl.fcntl(pipe, fcntl.F_GETFL) | os.O_ASYNC)


def has_ended(pipe: int, timeout_ms: int | None = None) -> bool:
    """Wait for the end, by default for ever. Never read: while somebody reads a socket, the kernel sends no signal."""
    poll = select.poll()
    poll.register(pipe, 0)  # an end is always reported
    return bool(poll.poll(timeout_ms))


def main() -> None:
    tie(0, signal.SIGTERM, -os.getpgrp())
    if has_ended(0, timeout_ms=0):  # before the kernel was asked
        sys.exit(1)
    os.execvp(sys.argv[1], sys.argv[1:])


if __name__ == "__main__":
    main()
