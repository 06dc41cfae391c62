"""Engines: what they report of themselves, and the leases by which they serve."""

from dataclasses import dataclass, replace
from datetime import datetime
from enum import StrEnum
from typing import Literal, Self

from tinsmith.backend import SamplerCapabilities, TrainerCapabilities


class EngineState(StrEnum):
    STARTING = "starting"
    LOADING = "loading"
    RECOVERING = "recovering"  # rebuilding the models of the engine before it
    READY = "ready"
    SILENT = "silent"  # it was ready, and has done nothing for long; `detail` says since when
    RESTARTING = "restarting"
    FAILED = "failed"  # given up; `detail` says why
    STOPPED = "stopped"


@dataclass(frozen=True, slots=True, kw_only=True)
class ConsistencyCounts:
    """Outcomes of the saves for sampling since the engine started, and the differences found, in nats."""

    consistent: int = 0
    inconsistent: int = 0  # refused, unless configured otherwise
    not_compared: int = 0
    last_max_difference: float | None = None  # of the last save compared
    last_mean_difference: float | None = None
    largest_difference: float | None = None  # of all saves


Side = Literal["training", "sampling"]


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceTurn:
    """Who has the devices that trainer and sampler take turns on."""

    side: Side
    since: datetime
    waiting: bool  # whether something of the other side waits for them
    changes: int = 0  # since the engine started
    changing_s: float = 0.0  # that these took together


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineFailure:
    """How an engine's last process ended, and which start follows."""

    attempt: int  # 1: the first restart since the engine was last ready
    text: str  # "the engine of 'toy' ended with exit code 1 (reference 1f2e3d4c in the operator's log)"
    reference: str  # in the text, and in every text that quotes it
    cause: str  # what the process said last, for the operator alone

    def explained(self, text: str) -> str:
        """Return a text that may quote this failure with the cause beside its reference, for the operator."""
        return text.replace(self.reference, f"{self.cause}; {self.reference}") if self.cause else text


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineCapabilities:
    """The joint abilities of one base model's trainer and sampler."""

    trainer: TrainerCapabilities
    sampler: SamplerCapabilities | None  # None: nobody samples

    @classmethod
    def of(cls, trainer: TrainerCapabilities, sampler: SamplerCapabilities | None) -> Self:
        """Both take the sequences that fit into either: what is sampled can be trained on."""
        if sampler is None:
            return cls(trainer=trainer, sampler=None)
        context = min(trainer.max_context_tokens, sampler.max_context_tokens)
        return cls(
            trainer=replace(trainer, max_context_tokens=context), sampler=replace(sampler, max_context_tokens=context)
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineRecord:
    """The latest report of one base model's engine about itself."""

    base_model: str
    state: EngineState
    updated_at: datetime
    detail: str = ""  # "loading weights", "compiling 3 of 22", the reason for a failure
    progress: float | None = None  # 0 to 1
    engine_id: str | None = None
    pid: int | None = None
    restarts: int = 0
    capabilities: EngineCapabilities | None = None  # None: not known yet
    consistency: ConsistencyCounts | None = None  # None: nothing has been saved for sampling
    turn: DeviceTurn | None = None  # None: trainer and sampler take no turns
    sampler_trouble: str | None = None  # why nothing can be sampled for now; training goes on
    failure: EngineFailure | None = None  # None: no process of it has ended by itself


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportedFigures:
    """The figures that a base model's engine reported."""

    base_model: str
    reported_at: datetime  # by the store's clock
    report: bytes  # `tinsmith.figures.Report`, encoded


@dataclass(frozen=True, slots=True, kw_only=True)
class Lease:
    """The right to serve one base model. A takeover raises the epoch; writes with a lower epoch are refused."""

    base_model: str
    engine_id: str
    epoch: int
    duration_s: float  # from each renewal, by the store's clock


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseHeld:
    """Another engine holds the lease."""

    base_model: str
    engine_id: str
    remaining_s: float  # unless it is renewed
    until: datetime  # by the store's clock; each renewal moves it
