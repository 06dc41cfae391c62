"""Engines, the hosts that they run on, and what waits for them."""

from datetime import datetime
from typing import Literal

from pydantic import BaseModel


class PendingView(BaseModel):
    """Operations of one tenant and kind that are queued, or running."""

    tenant: str
    kind: str
    state: str  # queued or running
    number: int
    oldest_s: float  # since the oldest of them arrived


class ComparedSaves(BaseModel):
    """Saves for sampling since the engine started, by the consistency gate's verdict. Differences are in nats."""

    consistent: int
    inconsistent: int
    not_compared: int
    largest_difference: float | None = None


class GpuView(BaseModel):
    number: int
    name: str
    utilization: float | None = None  # part of the last second in which it computed, 0 to 1
    used_bytes: int
    total_bytes: int


class InterfaceView(BaseModel):
    """Traffic since the host started."""

    name: str
    received_bytes: int
    sent_bytes: int


class HostView(BaseModel):
    """A host of engines or their workers, as an engine reported it last."""

    host: str
    engines: list[str]  # base models of which the engine, or workers of it, are there
    workers: int = 0  # processes
    worker_bytes: int | None = None  # of memory
    worker_cpu_s: float | None = None
    reported_at: datetime
    gpus: list[GpuView]
    interfaces: list[InterfaceView]


class TimesView(BaseModel):
    """How often something happened since its process started, and how long it took."""

    number: int
    mean_s: float | None = None
    most_s: float | None = None  # 99 % took at most this, a bound of the histogram on /metrics


class MemoryView(BaseModel):
    """Memory of an engine's trainer and sampler, in bytes, on all of their devices together."""

    planned: dict[str, int]  # by purpose, with as many models as there are places; empty: nothing was planned
    planned_total: int | None = None  # of trainer and sampler that take turns, the larger
    limit: int | None = None  # all that they may take
    used: int
    used_of: Literal["devices", "processes"]  # the engine's whole GPUs, or the engine and its workers on the host


class EngineView(BaseModel):
    base_model: str
    state: str
    detail: str | None = None
    progress: float | None = None  # 0 to 1
    restarts: int
    restarted: str | None = None  # how the last process ended
    sampler: str | None = None  # why nothing can be sampled for now
    text: str | None = None  # why the server reads and writes no text of the model
    reported_s: float | None = None  # since its last report
    running_s: float | None = None  # since it took the oldest operation that it is running
    turn: str | None = None  # training or sampling, if they take turns on the devices
    turn_awaited: bool | None = None  # whether the other side waits
    saves: ComparedSaves | None = None
    last_failure: str | None = None  # how its last process ended that ended by itself
    models: int = 0  # that have a place on the backend
    models_waiting: int = 0  # for a place
    max_models: int | None = None  # places; None: not known yet
    resident_bytes: int | None = None  # memory of its process
    memory: MemoryView | None = None  # for operators; None until the engine has reported
    recoveries: TimesView | None = None  # starts at which it rebuilt models
    work: list[PendingView]


class EngineList(BaseModel):
    engines: list[EngineView]
    hosts: list[HostView] | None = None  # for operators
    commits: TimesView  # of this server
    storage: str | None = None  # why requests cannot be recorded now
    free_bytes: int
    reserve_bytes: int
