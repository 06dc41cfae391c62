"""What observation hooks are told."""

from dataclasses import dataclass

from tinsmith.operations import Consistency, Failed


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerStarted:
    url: str
    base_models: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerStopping:
    url: str


@dataclass(frozen=True, slots=True, kw_only=True)
class OperationFinished:
    request_id: str
    base_model: str
    kind: str
    tenant: str
    model_id: str | None
    num_tokens: int
    queued_s: float  # from submit to claim
    run_s: float  # in the backend, shared by the whole batch
    batch_size: int
    failed: Failed | None = None
    consistency: Consistency | None = None  # of a save for sampling, also where it was refused
