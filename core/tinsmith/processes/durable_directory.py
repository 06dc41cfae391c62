"""Whether the file system of the data directory keeps locks, fsync and renames: `doctor` asks, and every start."""

import fcntl
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from tinsmith.errors import ConfigError
from tinsmith.scratch import Scratch
from tinsmith.settings import DataDir

ON_A_LOCAL_DISK: Final = "choose a directory on a local disk with --data-dir"


def existing_part(data_dir: DataDir) -> Path:
    """Return the data directory, or its nearest parent if it does not exist yet."""
    return next(path for path in (data_dir.root, *data_dir.root.parents) if path.exists())


def directory_faults(data_dir: DataDir) -> list[str]:
    """Test it for real, in a temporary directory. Raise ConfigError if nothing can be written there."""
    existing = existing_part(data_dir)
    try:
        with Scratch(".tinsmith-doctor-", existing) as scratch:
            return [*_lock_faults(scratch.path / "lock"), *_rename_faults(scratch.path)]
    except OSError as error:
        msg = (
            f"cannot write to {str(existing)!r}: {error.strerror}; choose another with --data-dir, or change its owner"
        )
        raise ConfigError(msg) from error


def _lock_faults(file: Path) -> Iterator[str]:
    """Lock twice: the second must be refused, or two servers could write at once."""
    with file.open("w", encoding="utf-8") as first, file.open("w", encoding="utf-8") as second:
        try:
            fcntl.flock(first, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            yield f"its file system has no locks: {error.strerror}"
            return
        try:
            fcntl.flock(second, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return
        yield "its file system grants one lock twice"


def _rename_faults(directory: Path) -> Iterator[str]:
    """Write, synchronise and rename as checkpoints are written."""
    before, after = directory / "before", directory / "after"
    after.write_bytes(b"old")
    try:
        with before.open("wb") as file:
            file.write(b"new")
            file.flush()
            os.fsync(file.fileno())
        before.replace(after)
        descriptor = os.open(directory, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    except OSError as error:
        yield f"its file system cannot write durably: {error.strerror}"
        return
    if after.read_bytes() != b"new":
        yield "its file system loses renames"
