"""All checks, in the order in which they run."""

from __future__ import annotations

from typing import Final

from tinsmith_conformance.checks import (
    client,
    endpoints,
    errors,
    finite,
    idempotency,
    isolation,
    losses,
    optimizer,
    ordering,
    poisoned,
    rest,
    resume,
    sampling,
    snapshots,
    wire,
)
from tinsmith_conformance.data import TOKENS, learned
from tinsmith_conformance.registry import Check, Group
from tinsmith_conformance.tester import Tester

GROUPS: Final[tuple[Group, ...]] = (
    wire.GROUP,
    ordering.GROUP,
    idempotency.GROUP,
    poisoned.GROUP,
    losses.GROUP,
    optimizer.GROUP,
    finite.GROUP,
    resume.GROUP,
    snapshots.GROUP,
    isolation.GROUP,
    sampling.GROUP,
    errors.GROUP,
    rest.GROUP,
    client.SDK,
    client.CLI,
    endpoints.GROUP,
)
CHECKS: Final[tuple[Check, ...]] = tuple(check for group in GROUPS for check in group.checks)


def warm_up(tester: Tester) -> None:
    """Let the server load and compile what most checks use, so that it does not count against their time limits."""
    model = tester.model()
    model.step([learned()])
    model.sampler().draw(TOKENS)
