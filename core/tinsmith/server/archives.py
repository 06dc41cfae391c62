"""A checkpoint as one tar file, written while it is sent. `tinker checkpoint download` asked for it up to SDK 0.35."""

import os
import tarfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import BinaryIO, Final

COMPLETE: Final = "checkpoint_complete"
"""An empty file at the end: the SDK takes an archive without it for one that was cut off."""

_CHUNK_BYTES: Final = 1 << 20


def archive_bytes(files: Sequence[BinaryIO]) -> int:
    """Return the size of the archive, for `Content-Length`."""
    contents = sum(tarfile.BLOCKSIZE + _padded(_size_of(file), tarfile.BLOCKSIZE) for file in files)
    return _padded(contents + 3 * tarfile.BLOCKSIZE, tarfile.RECORDSIZE)  # the marker, and two empty blocks


def archive(files: Sequence[BinaryIO]) -> Iterator[bytes]:
    """Yield the archive piece by piece, and close the files. They lie side by side in it."""
    sent = 0
    with ExitStack() as stack:
        for file in files:
            stack.enter_context(file)
        for file in files:
            size = _size_of(file)
            yield _header(Path(file.name).name, size)
            while chunk := file.read(_CHUNK_BYTES):
                yield chunk
            padded = _padded(size, tarfile.BLOCKSIZE)
            yield bytes(padded - size)
            sent += tarfile.BLOCKSIZE + padded
    yield _header(COMPLETE, 0)
    sent += tarfile.BLOCKSIZE
    yield bytes(_padded(sent + 2 * tarfile.BLOCKSIZE, tarfile.RECORDSIZE) - sent)


def _size_of(file: BinaryIO) -> int:
    return os.fstat(file.fileno()).st_size


def _header(name: str, size: int) -> bytes:
    info = tarfile.TarInfo(name)
    info.size, info.mode = size, 0o644
    return info.tobuf(tarfile.GNU_FORMAT)


def _padded(size: int, block: int) -> int:
    return -(-size // block) * block
