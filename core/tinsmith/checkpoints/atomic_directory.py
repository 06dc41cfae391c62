"""Directories that are created, replaced and deleted atomically, below a root that no name can escape.

A crash may leave these beside `<name>`: `.<name>.new-<epoch>-*` (half written: ignored, removed by the next write),
`.<name>.old` (being replaced: used if `<name>` is missing), `.<name>.deleted-*` (ignored, removed later) and `.made-*`
(half written by `write_new`; removed by `sweep`). All calls of `write` below one parent directory must come from one
process at a time. If a stopped process continues after another has taken over, it leaves the other's half-written
directories alone, because these have a higher epoch; but it may rename `<name>`, so names must be its own, such as
`TinkerPath.new_directory` returns. Readers, deletions and `write_new` may run in any process.
"""

import errno
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path, PurePosixPath
from typing import Final

from tinsmith.checkpoints.tinker_path import VERSION_MARK
from tinsmith.errors import DiskError, NotFoundError, UserError
from tinsmith.failpoints import durable_boundary

_NEW: Final = ".new-"
_LEFTOVERS: Final = (f".*{_NEW}*", ".*.deleted-*", ".made-*")
_LEFT_BEHIND_S: Final = 3600.0
_NOT_OURS: Final = {errno.EACCES, errno.EPERM, errno.EINVAL, errno.ENOTSUP, errno.ENOSYS, errno.EROFS}
_ROOT_DEPTH: Final = 3  # names on the way from the parent of the data directory to a root, at most
_TRIES: Final = 100  # of an operation that another process keeps undoing


def locate(root: Path, directory: str) -> Path:
    """Return the path of `directory` (relative, with slashes) below `root`. Raise UserError if it lies outside."""
    parts = PurePosixPath(directory).parts
    allowed = parts and all(not part.startswith((".", "/")) for part in parts)
    if not allowed or "\0" in directory or "\\" in directory:
        msg = f"directory {directory[:300]!r} is not allowed: no absolute paths, no parts that start with '.', no '\\'"
        raise UserError(msg)
    target = root.joinpath(*parts)
    if not target.resolve().is_relative_to(root.resolve()):
        msg = f"directory {directory[:300]!r} is not allowed: a symbolic link leads out of the checkpoint root"
        raise UserError(msg)
    return target


def find(root: Path, directory: str) -> Path:
    """Return the directory to read: `<name>`, or the old version if a crash interrupted its replacement."""
    target = locate(root, directory)
    for path in (target, _old(target), target):  # looks twice, as a replacement may have ended in between
        if path.is_dir() and not path.is_symlink():
            return path
    msg = f"no checkpoint {directory!r}"
    raise NotFoundError(msg)


def directories_in(parent: Path) -> set[str]:
    """Return the names of the complete directories right below `parent`, which need not exist."""
    if not parent.is_dir():
        return set()
    return {path.name for path in parent.iterdir() if path.is_dir() and not path.name.startswith(".")}


def write(root: Path, directory: str, fill: Callable[[Path], None], *, overwrite: bool, epoch: int = 0) -> None:
    """Let `fill` write files into a new directory, make them durable, and put it at `directory` in one rename.

    `epoch`: of the lease under which the process writes; later lease holders have higher epochs. Raise UserError
    if the directory exists (unless `overwrite`), DiskError if the disk refuses. Nothing has changed in either case.
    """
    target = locate(root, directory)
    with _disk_errors_named(directory, "written"):
        target.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        _repair(target.parent, epoch)
        if target.exists() and not overwrite:
            msg = (
                f"checkpoint 'tinker://{directory}' exists already; choose another name, or pass overwrite=True to "
                "replace it"
            )
            raise UserError(msg)
        fresh = _make_beside(target, f".{target.name}{_NEW}{epoch}-")
        try:
            _fill(fill, fresh)
            _sync(fresh)
            _replace(target, fresh)
        except BaseException:
            shutil.rmtree(fresh, ignore_errors=True)
            raise
        _sync_parents(root, target)
        shutil.rmtree(_old(target), ignore_errors=True)  # any remains are removed by the next write


def write_new(root: Path, directory: str, fill: Callable[[Path], None]) -> None:
    """Like `write`, but safe while others write below the same parent: only the new directory is touched.

    Raise UserError if the name is taken, DiskError if the disk refuses.
    """
    target = locate(root, directory)
    taken = f"{directory!r} exists already in {str(root)!r}; choose another name"
    with _disk_errors_named(directory, "written"):
        if os.path.lexists(target):
            raise UserError(taken)
        fresh = _make_beside(target, ".made-")
        try:
            fill(fresh)
            _sync(fresh)
            try:
                fresh.rename(target)
            except OSError as error:
                if target.exists():
                    raise UserError(taken) from error
                raise
        except BaseException:
            shutil.rmtree(fresh, ignore_errors=True)
            raise
        _sync_parents(root, target)


@durable_boundary("directory.delete")
def delete(root: Path, directory: str) -> None:
    """Remove the directory, if it exists, and all parents that this leaves empty."""
    target = locate(root, directory)
    with _disk_errors_named(directory, "deleted"):
        for path in (target, _old(target)):
            if path.is_dir():
                shutil.rmtree(_doom(path, target), ignore_errors=True)
        _remove_empty(root, target.parent)


def sweep(root: Path, *, older_than_s: float = _LEFT_BEHIND_S) -> None:
    """Remove leftovers of crashes below `root` that are too old to be in use, and parents that this leaves empty."""
    now = time.time()
    # os.walk passes over directories that somebody else removes meanwhile, where Path.rglob raises.
    found = [Path(parent, name) for parent, names, _ in os.walk(root) for name in names]
    for leftover in [path for path in found if any(map(path.match, _LEFTOVERS))]:
        with suppress(FileNotFoundError):
            if leftover.is_dir() and now - leftover.stat().st_ctime > older_than_s:
                shutil.rmtree(leftover, ignore_errors=True)
                _remove_empty(root, leftover.parent)


def _remove_empty(root: Path, directory: Path) -> None:
    """Remove a directory and its parents up to `root`, as long as they are empty. `write` recreates them."""
    while directory != root and directory.is_relative_to(root):
        try:
            directory.rmdir()
        except OSError:  # in use
            return
        directory = directory.parent


def _make_beside(target: Path, prefix: str) -> Path:
    """Make a directory beside `target`, even if a concurrent deletion removes the empty parents."""
    for _ in range(_TRIES):
        target.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with suppress(FileNotFoundError):
            return Path(tempfile.mkdtemp(prefix=prefix, dir=target.parent))
    msg = f"{target.parent} keeps being removed by another process; try again"
    raise OSError(msg)


@durable_boundary("directory.doom")
def _doom(path: Path, target: Path) -> Path:
    """Move the directory out of sight by one rename, so that readers see all of it or nothing."""
    doomed = Path(tempfile.mkdtemp(prefix=f".{target.name}.deleted-", dir=target.parent))
    path.rename(doomed)
    synchronise(target.parent)
    return doomed


def _old(target: Path) -> Path:
    return target.with_name(f".{target.name}.old")


@durable_boundary("directory.fill")
def _fill(fill: Callable[[Path], None], fresh: Path) -> None:
    fill(fresh)


@durable_boundary("directory.sync")
def _sync(fresh: Path) -> None:
    for path in (*fresh.iterdir(), fresh):
        synchronise(path)


def _replace(target: Path, fresh: Path) -> None:
    """Put `fresh` at `target`. Between the two renames, `find` returns the old version."""
    for _ in range(_TRIES):
        if target.exists():
            _set_aside(target)
        try:
            return put(target, fresh)
        except OSError:
            if not target.exists():
                raise
    msg = f"{target} keeps being restored by another process; try again"  # which cleans up, as after a crash
    raise OSError(msg)


def _set_aside(target: Path) -> None:
    target.rename(_old(target))


@durable_boundary("directory.put")
def put(target: Path, fresh: Path) -> None:
    fresh.rename(target)


@durable_boundary("directory.sync_parents")
def _sync_parents(root: Path, target: Path) -> None:
    for parent in target.relative_to(root).parents:
        synchronise(root / parent)
    _sync_ancestors(root)


@cache
def _sync_ancestors(root: Path) -> None:
    """Make the names of `root` and of the directories above it durable, once in a process.

    Their maker may have died before. A directory that this user cannot read, or whose file system cannot be
    synchronised (the root of an automounter, a read-only image), is not one that tinsmith made.
    """
    for parent in root.absolute().parents[:_ROOT_DEPTH]:
        try:
            synchronise(parent)
        except OSError as error:
            if error.errno not in _NOT_OURS:
                raise


def _repair(parent: Path, epoch: int) -> None:
    """Undo or finish operations that a crash interrupted in `parent`. A writer with a higher epoch may be active."""
    for leftover in parent.glob(".*.old"):
        target = leftover.with_name(leftover.name.removeprefix(".").removesuffix(".old"))
        if target.exists():
            shutil.rmtree(leftover, ignore_errors=True)
        else:
            leftover.rename(target)
    doomed = [path for path in parent.glob(f".*{_NEW}*") if _epoch_of(path) <= epoch]
    for leftover in (*doomed, *parent.glob(".*.deleted-*")):
        shutil.rmtree(leftover, ignore_errors=True)


def _epoch_of(half_written: Path) -> int:
    number, dash, _ = half_written.name.rpartition(_NEW)[2].partition("-")
    return int(number) if dash else 0


def synchronise(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _remedy(error: OSError) -> str:
    if error.errno in {errno.ENOSPC, errno.EDQUOT}:
        return "the previous content is unchanged; free space in the server's data directory and try again"
    return "check that the disk of the server's data directory is healthy and writable, and try again"


@contextmanager
def _disk_errors_named(directory: str, done: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        name = directory.partition(VERSION_MARK)[0]  # the version is of no use to who named it
        msg = f"checkpoint {name!r} could not be {done}: {error.strerror or error}; {_remedy(error)}"
        raise DiskError(msg) from error
