"""Finds Hugging Face hub models in this machine's cache without importing `huggingface_hub`.

Uses that library's directories and environment variables. A model is referred to as `NAME` or `NAME@REVISION`,
where a revision is a branch, a tag or a commit.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Self

from tinsmith_checkpoints.huggingface.model_files import missing_files

DEFAULT_REVISION: Final = "main"

_PART: Final = r"[A-Za-z0-9](?:[\w.-]{0,94}\w)?"
_NAME: Final = re.compile(rf"{_PART}(?:/{_PART})?", re.ASCII)
_TRUE: Final = {"1", "ON", "YES", "TRUE"}


@dataclass(frozen=True, slots=True)
class HubReference:
    """The name of a repository on the hub, and one of its revisions."""

    name: str
    revision: str = DEFAULT_REVISION

    @classmethod
    def parse(cls, text: str) -> Self | None:
        """Read `NAME` or `NAME@REVISION`. Return None if no repository can have that name."""
        name, _, revision = text.partition("@")
        if not _NAME.fullmatch(name) or "--" in name or ".." in name:
            return None
        return cls(name, revision or DEFAULT_REVISION)

    def __str__(self) -> str:
        return self.name if self.revision == DEFAULT_REVISION else f"{self.name}@{self.revision}"


def is_offline() -> bool:
    """Return whether the environment forbids requests to the hub."""
    return (os.environ.get("HF_HUB_OFFLINE") or os.environ.get("TRANSFORMERS_OFFLINE") or "").upper() in _TRUE


def offline_message(reference: HubReference) -> str:
    return (
        f"{str(reference)!r} is neither a directory nor complete in the cache {str(cache_directory())!r}, and "
        "HF_HUB_OFFLINE forbids downloading it; unset that, or give a directory that holds the model"
    )


def hub_endpoint() -> str:
    return os.environ.get("HF_ENDPOINT", "https://huggingface.co").rstrip("/")


def cache_directory() -> Path:
    """Return the directory that holds downloaded repositories; it may not exist yet."""
    for variable in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"):
        if variable in os.environ:
            return Path(os.path.expandvars(os.environ[variable])).expanduser()
    home = os.environ.get("HF_HOME") or Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")) / "huggingface"
    return Path(os.path.expandvars(home)).expanduser() / "hub"


def repository_directory(reference: HubReference) -> Path:
    return cache_directory() / f"models--{reference.name.replace('/', '--')}"


def cached_model(reference: HubReference) -> Path | None:
    """Return the model's directory, or None if it is missing from the cache or only partly downloaded."""
    repository = repository_directory(reference)
    ref = repository / "refs" / reference.revision
    commit = ref.read_text(encoding="utf-8").strip() if ref.is_file() else reference.revision
    snapshot = repository / "snapshots" / commit
    return None if missing_files(snapshot) else snapshot
