"""Checks the data directory: writable, with space, on a file system that supports locks and renames."""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from tinsmith.commands.doctor.finding import Finding, gigabytes
from tinsmith.file_systems import NETWORK, file_system_of
from tinsmith.scratch import Scratch
from tinsmith.settings import DataDir

_LITTLE: Final = 10e9  # bytes; a few checkpoints of an adapter, not one of a large model
_TOO_LITTLE: Final = 0.5e9
_ON_NETWORK: Final = "checkpoints need a server that keeps locks, renames and fsync, and a store on PostgreSQL"
_CAUTIONS: Final = dict.fromkeys(NETWORK, _ON_NETWORK) | {
    "9p": "it may not keep locks, and SQLite needs them; use a local disk",
    "tmpfs": "everything in it is lost at a reboot; use a disk",
    "ramfs": "everything in it is lost at a reboot; use a disk",
    "overlay": "it belongs to a container and is lost with it; mount a volume",
}


def check_data_directory(data_dir: DataDir, *, with_database: bool) -> Iterator[Finding]:
    """Test it for real, in a temporary directory inside it, or inside its nearest parent if it does not exist yet.

    `with_database` means that it is to hold an SQLite database.
    """
    subject = f"data directory {data_dir.root}"
    existing = next(path for path in (data_dir.root, *data_dir.root.parents) if path.exists())
    try:
        with Scratch(".tinsmith-doctor-", existing) as scratch:
            faults = [*_lock_faults(scratch.path / "lock"), *_rename_faults(scratch.path)]
    except OSError as error:
        found = f"cannot write to {str(existing)!r}: {error.strerror}"
        yield Finding(subject, "problem", found, "choose another with --data-dir, or change its owner")
        return
    for fault in faults:
        yield Finding(subject, "problem", fault, "choose a directory on a local disk with --data-dir")
    if not faults:
        yield Finding(subject, "ok", "writable; keeps locks, fsync and renames")
    yield _space(subject, existing)
    yield from _file_system(subject, existing, with_database=with_database)


def _lock_faults(file: Path) -> Iterator[str]:
    """Lock twice: the second must be refused, or two servers could write at once."""
    with file.open("w") as first, file.open("w") as second:
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


def _space(subject: str, directory: Path) -> Finding:
    free = shutil.disk_usage(directory).free
    found = f"{gigabytes(free)} free"
    if free >= _LITTLE:
        return Finding(subject, "ok", found)
    remedy = "free some, or choose a larger disk with --data-dir: checkpoints of a large model need many GB"
    return Finding(subject, "problem" if free < _TOO_LITTLE else "note", found, remedy)


def _file_system(subject: str, directory: Path, *, with_database: bool) -> Iterator[Finding]:
    kind = file_system_of(directory)
    if kind in NETWORK and with_database:
        remedy = "choose a directory on a local disk with --data-dir, or set store.url to a PostgreSQL database"
        yield Finding(subject, "problem", f"on {kind}, where SQLite is refused", remedy)
    elif kind in _CAUTIONS:
        yield Finding(subject, "note", f"on {kind}", _CAUTIONS[kind])
