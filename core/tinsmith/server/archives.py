"""A checkpoint as one tar file, written while it is sent. `tinker checkpoint download` asked for it up to SDK 0.35."""

import tarfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

COMPLETE: Final = "checkpoint_complete"
"""An empty file at the end: the SDK takes an archive without it for one that was cut off."""

_CHUNK_BYTES: Final = 1 << 20


def archive_bytes(files: Sequence[Path]) -> int:
    """Return the size of the archive, for `Content-Length`."""
    contents = sum(tarfile.BLOCKSIZE + _padded(file.stat().st_size, tarfile.BLOCKSIZE) for file in files)
    return _padded(contents + 3 * tarfile.BLOCKSIZE, tarfile.RECORDSIZE)  # the marker, and two empty blocks


def archive(files: Sequence[Path]) -> Iterator[bytes]:
    """Yield the archive piece by piece. The files lie side by side in it."""
    sent = 0
    for file in files:
        size = file.stat().st_size
        yield _header(file.name, size)
        with file.open("rb") as source:
            while chunk := source.read(_CHUNK_BYTES):
                yield chunk
        padded = _padded(size, tarfile.BLOCKSIZE)
        yield bytes(padded - size)
        sent += tarfile.BLOCKSIZE + padded
    yield _header(COMPLETE, 0)
    sent += tarfile.BLOCKSIZE
    yield bytes(_padded(sent + 2 * tarfile.BLOCKSIZE, tarfile.RECORDSIZE) - sent)


def _header(name: str, size: int) -> bytes:
    info = tarfile.TarInfo(name)
    info.size, info.mode = size, 0o644
    return info.tobuf(tarfile.GNU_FORMAT)


def _padded(size: int, block: int) -> int:
    return -(-size // block) * block
