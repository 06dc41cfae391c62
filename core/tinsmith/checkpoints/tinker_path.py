"""`tinker://` paths: the names of checkpoints, and the directories of their versions, `<path>~<version>`."""

import os
import re
import secrets
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Self

from tinsmith.errors import UserError
from tinsmith.store import CheckpointKind

_SCHEME = "tinker://"
_KIND_OF_SEGMENT: dict[str, CheckpointKind] = {
    "weights": "training",
    "sampler_weights": "sampler",
    "external_weights": "external",
}
_SEGMENT_OF_KIND: dict[CheckpointKind, str] = {kind: segment for segment, kind in _KIND_OF_SEGMENT.items()}
VERSION_MARK: Final = "~"  # begins the suffix of a directory; not allowed in names
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.+=@:-]{0,199}")
_KIND_DEPTH: Final = 2  # of directories that hold checkpoints: MODEL/weights


@dataclass(frozen=True, slots=True, kw_only=True)
class TinkerPath:
    """`tinker://<model_id>/<weights|sampler_weights|external_weights>/<name>`."""

    model_id: str
    kind: CheckpointKind
    name: str

    def __post_init__(self) -> None:
        for what, value in (("model id", self.model_id), ("checkpoint name", self.name)):
            if not _NAME.fullmatch(value):
                msg = (
                    f"{what} {value[:200]!r} is not allowed: use 1 to 200 letters, digits, '_', '.', '+', '=', '@', "
                    "':' or '-', the first a letter, digit or '_'"
                )
                raise UserError(msg)

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parse a path. Raise UserError if `text` is not one."""
        parts = text.removeprefix(_SCHEME).split("/")
        if not text.startswith(_SCHEME) or len(parts) != 3 or parts[1] not in _KIND_OF_SEGMENT:
            msg = (
                f"{text[:300]!r} is not a checkpoint path; expected "
                "tinker://<training run id>/<weights|sampler_weights|external_weights>/<name>"
            )
            raise UserError(msg)
        return cls(model_id=parts[0], kind=_KIND_OF_SEGMENT[parts[1]], name=parts[2])

    def __str__(self) -> str:
        return f"{_SCHEME}{self.model_id}/{self.checkpoint_id}"

    @property
    def checkpoint_id(self) -> str:
        """The last two parts of the path, as used in the REST API."""
        return f"{_SEGMENT_OF_KIND[self.kind]}/{self.name}"

    def new_directory(self) -> str:
        """Return a directory below the checkpoint root for one version of this checkpoint, which nobody else uses.

        So a writer, reader or deleter of a version never meets another version, however late it is. The record of a
        checkpoint says which directory is its own. Names have no slash or leading dot, so they cannot escape the root.
        """
        return f"{self.model_id}/{self.checkpoint_id}{VERSION_MARK}{secrets.token_hex(6)}"

    @classmethod
    def of_directory(cls, directory: str) -> Self:
        """Return the path of which this directory is a version. Raise UserError if it is none."""
        return cls.parse(_SCHEME + directory.partition(VERSION_MARK)[0])


def newest_on_disk(root: Path, path: TinkerPath) -> str:
    """Return the directory of the newest version on disk; if there is none, one that does not exist.

    Ask the store, if there is one: it alone knows whether that version's save was recorded.
    """
    parent = root / path.model_id / path.checkpoint_id
    found = [each for each in parent.parent.glob(f"{parent.name}{VERSION_MARK}*") if each.is_dir()]
    newest = max(found, key=lambda each: each.stat().st_mtime, default=parent)
    return str(newest.relative_to(root))


def versions_on_disk(root: Path, *, older_than_s: float) -> Iterator[str]:
    """Yield the directories of versions whose name is at least `older_than_s` old."""
    before = time.time() - older_than_s
    for found in _named_versions(root):
        try:
            if found.is_dir() and not found.is_symlink() and found.stat().st_ctime <= before:
                yield str(found.relative_to(root))
        except FileNotFoundError:  # deleted meanwhile
            continue


def _named_versions(root: Path) -> Iterator[Path]:
    """Walk: that passes over directories which somebody else removes meanwhile, where Path.glob raises."""
    for parent, names, _ in os.walk(root):
        if len(Path(parent).relative_to(root).parts) == _KIND_DEPTH:
            yield from (Path(parent, name) for name in names if VERSION_MARK in name and not name.startswith("."))
            names.clear()
