"""How a check can end."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Verdict(StrEnum):
    PASSED = "passed"
    FAILED = "failed"
    SKIPPED = "skipped"


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    verdict: Verdict
    detail: str  # why it failed or was skipped
    seconds: float


class SkippedError(Exception):
    """The server says that it does not offer what this check tests."""


class CheckError(AssertionError):
    """The server does not behave."""


class RequestFailedError(CheckError):
    """A future ended in a failure that the server reported as the protocol says."""

    def __init__(self, message: str, category: str) -> None:
        super().__init__(f"the server failed the request, category '{category}': {message}")
        self.message = message
        self.category = category


def expect(condition: object, message: str) -> None:
    if not condition:
        raise CheckError(message)


def skip(reason: str) -> None:
    raise SkippedError(reason)
