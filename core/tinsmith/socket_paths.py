"""Unix sockets in directories with long paths: an address holds 107 bytes, on some systems 103."""

import os
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Final, Self

from tinsmith.scratch import Scratch

_MOST_BYTES: Final = 103
_MOST_NAME_BYTES: Final = 40
_DESCRIPTORS: Final = Path("/proc/self/fd")


class SocketDirectory:
    """Addresses of the sockets in a directory, valid in this process until it is closed."""

    def __init__(self, directory: Path, *, descriptors: Path = _DESCRIPTORS) -> None:
        """Raise OSError if it is no directory. `descriptors`: where Linux names open directories by short paths."""
        self._stack = ExitStack()
        self._path = str(directory)
        if len(os.fsencode(directory)) + 1 + _MOST_NAME_BYTES <= _MOST_BYTES:
            return
        if descriptors.is_dir():
            opened = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
            self._stack.callback(os.close, opened)
            self._path = f"{descriptors}/{opened}"
        else:
            link = self._stack.enter_context(Scratch("tinsmith-sockets-", Path("/tmp"))).path / "to"
            link.symlink_to(directory.absolute())
            self._path = str(link)

    def address(self, name: str) -> str:
        """Return the address of the socket of this name, which has at most 40 bytes."""
        return f"{self._path}/{name}"

    def close(self) -> None:
        self._stack.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()
