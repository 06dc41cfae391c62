"""One line of what `tinsmith doctor` reports."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Status = Literal["ok", "note", "problem"]


@dataclass(frozen=True, slots=True)
class Finding:
    """What was looked at, how it is, and what to do about it."""

    subject: str
    status: Status
    found: str
    remedy: str = ""


def gigabytes(size: int) -> str:
    return f"{size / 1e9:.1f} GB"
