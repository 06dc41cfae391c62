"""Directories that appear, are replaced and disappear whole, below one root that no name can leave.

Beside `<name>` there may be, after a crash, `.<name>.new-*` (half written: ignored, removed by the next write),
`.<name>.old` (being replaced: stands in for a missing `<name>`) and `.<name>.deleted-*` (ignored, removed later).
All writes below one parent directory come from one process at a time; readers and deletions may be anywhere.
"""

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath

from tinsmith.errors import NotFoundError, ServerError, UserError


def locate(root: Path, directory: str) -> Path:
    """Return where `directory` (relative, with slashes) lies. Raise UserError where it would leave `root`."""
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
    """Return the directory to read: `<name>`, or the version that a crash stopped from being replaced."""
    target = locate(root, directory)
    for path in (target, _old(target), target):  # a third look: the replacement may have ended in between
        if path.is_dir() and not path.is_symlink():
            return path
    msg = f"no checkpoint {directory!r}"
    raise NotFoundError(msg)


def write(root: Path, directory: str, fill: Callable[[Path], None], *, overwrite: bool) -> None:
    """Let `fill` write files into a new directory, make them durable, and put it at `directory` in one rename.

    Raise UserError where it exists and not `overwrite`, ServerError where the disk refuses; then nothing has changed.
    """
    target = locate(root, directory)
    with _disk_errors_named(directory, "written"):
        target.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        _repair(target.parent)
        if target.exists() and not overwrite:
            msg = f"checkpoint {directory!r} exists already; choose another name, or pass overwrite=True to replace it"
            raise UserError(msg)
        fresh = Path(tempfile.mkdtemp(prefix=f".{target.name}.new-", dir=target.parent))
        try:
            fill(fresh)
            for path in (*fresh.iterdir(), fresh):
                _fsync(path)
            _replace(target, fresh)
        except BaseException:
            shutil.rmtree(fresh, ignore_errors=True)
            raise
        for parent in target.relative_to(root).parents:
            _fsync(root / parent)
        shutil.rmtree(_old(target), ignore_errors=True)  # what stays is removed by the next write


def delete(root: Path, directory: str) -> None:
    """Remove the directory; one that is not there is no error."""
    target = locate(root, directory)
    with _disk_errors_named(directory, "deleted"):
        for path in (target, _old(target)):
            if path.is_dir():
                doomed = Path(tempfile.mkdtemp(prefix=f".{target.name}.deleted-", dir=target.parent))
                path.rename(doomed)  # over the empty directory: readers see all or nothing
                _fsync(target.parent)
                shutil.rmtree(doomed, ignore_errors=True)


def _old(target: Path) -> Path:
    return target.with_name(f".{target.name}.old")


def _replace(target: Path, fresh: Path) -> None:
    """Put `fresh` at `target`. Between the two renames `find` answers with the old version."""
    if target.exists():
        target.rename(_old(target))
    fresh.rename(target)


def _repair(parent: Path) -> None:
    """Undo or finish what a crash left among the children of `parent`."""
    for leftover in parent.glob(".*.old"):
        target = leftover.with_name(leftover.name.removeprefix(".").removesuffix(".old"))
        if target.exists():
            shutil.rmtree(leftover, ignore_errors=True)
        else:
            leftover.rename(target)
    for pattern in (".*.new-*", ".*.deleted-*"):
        for leftover in parent.glob(pattern):
            shutil.rmtree(leftover, ignore_errors=True)


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def _disk_errors_named(directory: str, done: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        msg = f"checkpoint {directory!r} could not be {done}: {error.strerror or error}"
        raise ServerError(msg) from error
