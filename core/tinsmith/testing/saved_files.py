"""Reading what a server has saved, from its data directory."""

from pathlib import Path

from tinsmith.checkpoints.saved import read_checkpoint
from tinsmith.checkpoints.tinker_path import TinkerPath, newest_on_disk
from tinsmith_checkpoints.format import Checkpoint


def read_saved(data_dir: Path, path: str) -> Checkpoint:
    """Return the newest version of a checkpoint on disk, verified."""
    root = data_dir / "checkpoints"
    return read_checkpoint(root, newest_on_disk(root, TinkerPath.parse(path)))
