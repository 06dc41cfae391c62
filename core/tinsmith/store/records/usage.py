"""What operations use, and how much is kept of a tenant."""

from dataclasses import dataclass, fields


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """The usage of one operation. `engine_s` is its share of the time that its batch took."""

    trained_tokens: int = 0
    prefilled_tokens: int = 0  # of prompts, and of forward passes without a gradient
    sampled_tokens: int = 0
    engine_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptBytes:
    """A tenant's bytes on the server's disk and in its database."""

    tenant: str
    log: int = 0  # payloads and results of operations
    checkpoints: int = 0
    snapshots: int = 0  # of open sampling sessions that own one
    recovery_points: int = 0
    routed_experts: int = 0
    metrics: int = 0  # and rollouts
    descriptions: int = 0  # what clients say of sessions and runs: tags, names, metadata

    @property
    def by_kind(self) -> dict[str, int]:
        return {each.name: getattr(self, each.name) for each in fields(self) if each.name != "tenant"}

    @property
    def total(self) -> int:
        return sum(self.by_kind.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskUse:
    """The storage of one tenant, and its limit."""

    kept: KeptBytes
    allowed_bytes: int
