"""Find base models by name: a directory, or what is already in this machine's Hugging Face cache. Downloads nothing."""

import os
from pathlib import Path

from tinsmith.hookspecs import hookimpl


@hookimpl
def tinsmith_resolve_base_model(name: str) -> Path | None:
    directory = Path(name).expanduser()
    if directory.is_dir():
        return directory
    return _cached_snapshot(_cache_root(), name)


def _cache_root() -> Path:
    """Where huggingface_hub keeps repositories, by its own environment variables."""
    if "HF_HUB_CACHE" in os.environ:
        return Path(os.environ["HF_HUB_CACHE"])
    home = os.environ.get("HF_HOME") or Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")) / "huggingface"
    return Path(home) / "hub"


def _cached_snapshot(root: Path, name: str) -> Path | None:
    repository = root.expanduser() / f"models--{name.replace('/', '--')}"
    main = repository / "refs" / "main"
    if not main.is_file():
        return None
    snapshot = repository / "snapshots" / main.read_text(encoding="utf-8").strip()
    return snapshot if snapshot.is_dir() else None
