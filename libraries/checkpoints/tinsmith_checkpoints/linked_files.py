"""Files that a checkpoint takes over as they are, because they hold exactly what it would write."""

import errno
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from tinsmith_checkpoints.huggingface.safetensors_files import StoredTensor, index_file, read_header, tensor_files

_CANNOT_LINK: Final = frozenset({errno.EXDEV, errno.EPERM, errno.EMLINK, errno.EOPNOTSUPP, errno.ENOSYS})


def whole_set(stem: str, stored: Mapping[str, StoredTensor], shard_bytes: int) -> list[Path]:
    """Return the shards, and their index, that hold these tensors and nothing else; empty if there are none."""
    directories = {tensor.file.parent for tensor in stored.values()}
    if len(directories) != 1 or not _as_named(stored):
        return []
    (directory,) = directories
    index = index_file(directory, stem)
    if not index.exists() or tensor_files(directory, stem) != {name: tensor.file for name, tensor in stored.items()}:
        return []
    sizes: dict[Path, list[int]] = {}
    for tensor in stored.values():
        sizes.setdefault(tensor.file, []).append(tensor.num_bytes)
    if any(len(each) > 1 and sum(each) > shard_bytes for each in sizes.values()):
        return []
    return [index, *sizes]


def whole_file(stored: Mapping[str, StoredTensor]) -> Path | None:
    """Return the file that holds these tensors and nothing else, if there is one."""
    files = {tensor.file for tensor in stored.values()}
    if len(files) != 1 or not _as_named(stored):
        return None
    (file,) = files
    return file if read_header(file).keys() == stored.keys() else None


def _as_named(stored: Mapping[str, StoredTensor]) -> bool:
    return all(tensor.name == name and tensor.dtype == "F32" for name, tensor in stored.items())


def link(source: Path, target: Path) -> None:
    """Give a file that never changes a second name, or copy it where the file system cannot."""
    try:
        target.hardlink_to(source)
    except OSError as error:
        if error.errno not in _CANNOT_LINK:
            raise
        shutil.copyfile(source, target)
