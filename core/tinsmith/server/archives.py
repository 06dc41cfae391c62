"""A checkpoint as one tar file, made while it is sent.

One version always gives the same bytes, so a download that broke off can go on where it ended.
"""

import hashlib
import os
import re
import tarfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import BinaryIO, Final

COMPLETE: Final = "checkpoint_complete"
"""An empty file at the end: the SDK takes an archive without it for one that was cut off."""

_CHUNK_BYTES: Final = 1 << 20
_RANGE: Final = re.compile(r"bytes=([0-9]{0,19})-([0-9]{0,19})")

Range = tuple[int, int]
"""The first byte, and the one behind the last."""


class RangeOutsideError(Exception):
    """Nothing of the range that a client asked for is there."""


class Archive:
    """The files lie side by side in it, in the given order. They are closed once it has been read."""

    def __init__(self, files: Sequence[BinaryIO], version: str) -> None:
        """`version` names the version of the checkpoint."""
        self._files = files
        self._parts: list[tuple[int, bytes | BinaryIO]] = []
        facts = [version]
        for file in files:
            name, state = Path(file.name).name, os.fstat(file.fileno())
            facts += [name, str(state.st_size), str(state.st_mtime_ns)]
            self._add(_header(name, state.st_size))
            self._parts.append((state.st_size, file))
            self._add(bytes(-state.st_size % tarfile.BLOCKSIZE))
        self._add(_header(COMPLETE, 0))
        end = self.size + 2 * tarfile.BLOCKSIZE
        self._add(bytes(2 * tarfile.BLOCKSIZE + -end % tarfile.RECORDSIZE))
        self.etag = f'"{hashlib.sha256(chr(0).join(facts).encode()).hexdigest()[:32]}"'

    @property
    def size(self) -> int:
        return sum(length for length, _ in self._parts)

    def _add(self, content: bytes) -> None:
        self._parts.append((len(content), content))

    def close(self) -> None:
        for file in self._files:
            file.close()

    def read(self, start: int = 0, stop: int | None = None) -> Iterator[bytes]:
        """Yield these bytes piece by piece, then close the files."""
        stop = self.size if stop is None else stop
        with ExitStack() as stack:
            stack.callback(self.close)
            at = 0
            for length, part in self._parts:
                first, last = max(start - at, 0), min(stop - at, length)
                at += length
                if first >= last:
                    continue
                if isinstance(part, bytes):
                    yield part[first:last]
                else:
                    yield from _read(part, first, last)


def _read(file: BinaryIO, first: int, last: int) -> Iterator[bytes]:
    file.seek(first)
    while first < last:
        chunk = file.read(min(_CHUNK_BYTES, last - first))
        if not chunk:
            msg = f"{Path(file.name).name} is shorter than it was"
            raise EOFError(msg)
        first += len(chunk)
        yield chunk


def _header(name: str, size: int) -> bytes:
    info = tarfile.TarInfo(name)
    info.size, info.mode = size, 0o644
    return info.tobuf(tarfile.GNU_FORMAT)


def wanted_range(asked: str | None, if_range: str | None, archive: Archive) -> Range | None:
    """Return the range of a `Range` header; None if the whole is to be sent: several ranges, or another version.

    Raise RangeOutsideError if the range begins behind the end.
    """
    found = None if asked is None else _RANGE.fullmatch(asked.replace(" ", ""))
    if found is None or (if_range is not None and if_range != archive.etag):
        return None
    first, last = found.groups()
    if first:
        start, stop = int(first), min(int(last) + 1 if last else archive.size, archive.size)
        if last and int(last) < start:
            return None  # not a range at all
    elif last:
        start, stop = max(archive.size - int(last), 0), archive.size
    else:
        return None
    if start >= archive.size or start == stop:
        raise RangeOutsideError
    return start, stop
