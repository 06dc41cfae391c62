"""One line of what `tinsmith doctor` reports."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Status = Literal["ok", "note", "problem"]


@dataclass(frozen=True, slots=True)
class Finding:
    """The subject, its state, and the remedy."""

    subject: str
    status: Status
    found: str
    remedy: str = ""


def gigabytes(size: int) -> str:
    return f"{size / 1e9:.1f} GB"
