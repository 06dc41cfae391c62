"""Checkpoints below the server's checkpoint root: each is written, replaced, read and deleted as a whole.

`tinsmith_checkpoints.format` describes the directory's contents.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from datetime import datetime
from pathlib import Path
from typing import BinaryIO, TypeVar

from tinsmith.backend import HostSnapshot, ModelState
from tinsmith.checkpoints import atomic_directory
from tinsmith.errors import NotFoundError, ServerError, UserError
from tinsmith.store import CheckpointKind
from tinsmith_checkpoints.age_files import encrypt_files
from tinsmith_checkpoints.format import MANIFEST, SHARD_BYTES, Checkpoint, checked, read, read_weights, write
from tinsmith_checkpoints.linked_files import link

T = TypeVar("T")


def write_checkpoint(  # noqa: PLR0913 - what a checkpoint says, and how it is put there
    root: Path,
    directory: str,
    *,
    kind: CheckpointKind,
    state: ModelState,
    base_model: str,
    user_metadata: Mapping[str, str],
    created_at: datetime,
    overwrite: bool,
    beside_others: bool = False,
    epoch: int = 0,
    model_path: Path | None = None,
    shard_bytes: int = SHARD_BYTES,
    finite: bool = False,
    recipients: Sequence[str] = (),
) -> int:
    """Write the parts of `state` that `kind` needs, and return the checkpoint's size in bytes.

    The mappings may be lazy; tensors of a fully fine-tuned model are read one at a time. `model_path` is the base
    model's directory, from which configuration and tokenizer are copied.

    `epoch`: of the lease under which an engine writes.

    With `recipients`, files are encrypted for them (`tinsmith_checkpoints.age_files`), and end in `.age`.

    With `finite`, raise UserError if weights or moments are not finite. Pending gradients may be.

    Use `beside_others` if other processes may be writing below the same parent; it excludes `overwrite`. Raise
    UserError if the directory exists (unless `overwrite`), ServerError if the state is malformed or the disk refuses.
    After any error, the previous content is unchanged.
    """
    state = checked(state)
    sizes: list[int] = []

    def fill(fresh: Path) -> None:
        write(
            fresh,
            state,
            kind=kind,
            base_model=base_model,
            user_metadata=user_metadata,
            created_at=created_at,
            model_path=model_path,
            shard_bytes=shard_bytes,
            finite=finite,
        )
        if recipients:
            encrypt_files(fresh, recipients)
        sizes.extend(path.stat().st_size for path in fresh.iterdir())

    if beside_others:
        assert not overwrite
        atomic_directory.write_new(root, directory, fill)
    else:
        atomic_directory.write(root, directory, fill, overwrite=overwrite, epoch=epoch)
    return sum(sizes)


def read_checkpoint(root: Path, directory: str) -> Checkpoint:
    """Verify a training or sampler checkpoint, whose tensors are read from its files on access, and not kept.

    If a file is replaced after that, reading from it raises ServerError.

    Raise NotFoundError if there is none, UnsupportedError if it is an export or was written by a newer tinsmith, and
    ServerError if a file is missing or damaged.
    """
    return _read_stable(root, directory, read)


def read_snapshot(root: Path, directory: str, snapshot_id: str) -> HostSnapshot:
    """Read and verify only the weights. Raises the errors of `read_checkpoint`."""
    lora, weights = _read_stable(root, directory, read_weights)
    return HostSnapshot(snapshot_id, lora, weights)


def delete_checkpoint(root: Path, directory: str) -> None:
    """Delete the checkpoint, if it exists. It disappears atomically for all readers."""
    atomic_directory.delete(root, directory)


def copy_checkpoint(root: Path, directory: str, copy: str) -> None:
    """Put a checkpoint's files at another directory as well, under second names where the file system can.

    Raise NotFoundError if there is no such checkpoint, or if it is deleted meanwhile.
    """
    files = checkpoint_files(root, directory)

    def fill(fresh: Path) -> None:
        for file in files:
            try:
                link(file, fresh / file.name)
            except FileNotFoundError as error:
                msg = f"checkpoint {directory!r} was deleted while it was copied"
                raise NotFoundError(msg) from error

    atomic_directory.write_new(root, copy, fill)


def has_manifest(root: Path, directory: str) -> bool:
    """Return whether a checkpoint can be read back: an export cannot."""
    return (atomic_directory.find(root, directory) / MANIFEST).exists()


def checkpoint_files(root: Path, directory: str) -> list[Path]:
    """List the files of a checkpoint of any kind, by name. Raise NotFoundError if there is none."""
    return files_in(atomic_directory.find(root, directory))


def open_checkpoint_files(root: Path, directory: str) -> list[BinaryIO]:
    """Open all files of one version of a checkpoint. They stay readable if it is replaced or deleted."""
    while True:
        found = atomic_directory.find(root, directory)
        with ExitStack() as stack, suppress(FileNotFoundError):  # replaced in between: open the next version
            version = found.stat()
            files: list[BinaryIO] = [stack.enter_context(path.open("rb")) for path in files_in(found)]
            if os.path.samestat(version, atomic_directory.find(root, directory).stat()):
                stack.pop_all()
                return files


def files_in(directory: Path) -> list[Path]:
    return sorted(path for path in directory.iterdir() if path.is_file() and not path.is_symlink())


def _read_stable(root: Path, directory: str, read_one: Callable[[Path], T]) -> T:
    """Read a directory, and read it again if it was replaced meanwhile, as its files then belong to two versions."""
    while True:
        found = atomic_directory.find(root, directory)
        identity = found.stat().st_ino
        try:
            return read_one(found)
        except (ServerError, UserError) as error:
            if found.is_dir() and found.stat().st_ino == identity:
                msg = f"checkpoint {directory!r}: {error}"
                raise type(error)(msg) from error
