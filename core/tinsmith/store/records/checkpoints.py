"""Checkpoints, and how many tenants keep."""

from dataclasses import dataclass, field
from datetime import datetime
from typing import Self

from tinsmith.operations import LoraConfig
from tinsmith_checkpoints.values import CheckpointKind as CheckpointKind


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointRecord:
    """A checkpoint that a tenant has, of whatever kind; its files are in `directory`."""

    path: str  # tinker://<model_id>/<weights|sampler_weights|external_weights>/<name>
    model_id: str
    tenant: str
    kind: CheckpointKind
    base_model: str
    lora: LoraConfig
    created_at: datetime
    size_bytes: int
    directory: str  # relative to the checkpoint root
    step: int = 0
    public: bool = False  # belongs to the path: a save that overwrites a published checkpoint leaves it published
    expires_at: datetime | None = None
    user_metadata: dict[str, str] = field(default_factory=dict)

    def is_version(self, read: Self) -> bool:
        """Return whether this is the version that was read, with the same expiry time."""
        return all(getattr(self, name) == getattr(read, name) for name in ("created_at", "directory", "expires_at"))


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptCheckpoints:
    """A tenant's checkpoints."""

    number: int = 0
    num_bytes: int = 0
