"""The directories of checkpoints on disk: each version has one of its own, `<path>~<version>`."""

import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from tinsmith.checkpoints.tinker_path import VERSION_MARK, TinkerPath

_KIND_DEPTH: Final = 2  # of directories that hold checkpoints: MODEL/weights


def newest_on_disk(root: Path, path: TinkerPath) -> str:
    """Return the directory of the newest version on disk; if there is none, one that does not exist.

    Ask the store, if there is one: it alone knows whether that version's save was recorded.
    """
    parent = root / path.model_id / path.checkpoint_id
    found = [each for each in parent.parent.glob(f"{parent.name}{VERSION_MARK}*") if each.is_dir()]
    newest = max(found, key=lambda each: each.stat().st_mtime, default=parent)
    return str(newest.relative_to(root))


def versions_on_disk(root: Path, *, older_than_s: float) -> Iterator[str]:
    """Yield the directories of versions that were given their name so long ago."""
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
