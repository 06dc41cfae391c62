"""The scheduler's seam: from pending work to the next batch, as a pure function over plain values.

No clock, store or backend inside, so the same code runs in production, in property tests and in a simulator.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from tinsmith.backend import BackendConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Pending:
    """One claimed operation that waits for its turn.

    Operations of models and samples are planned apart, each with a memory of their own. Samples have no order, so each
    counts as a model of its own, and only the oldest one of each tenant is pending. One is taken from each batch.
    """

    request_id: str
    model_id: str
    tenant: str
    kind: str  # codec.kind_of
    seq_id: int
    num_tokens: int
    enqueued_at_s: float  # seconds on the clock of `now_s`


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    max_batch_tokens: int  # of one batch; a single larger operation still runs, alone


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """What runs next: operations of one kind, in the order given, and the memory for the next call.

    Empty `request_ids` means that nothing can run.
    """

    kind: str | None = None
    request_ids: tuple[str, ...] = ()
    memory: Mapping[str, float] = field(default_factory=dict)  # opaque to all but the scheduler


class Scheduler(ABC):
    """A policy. Implementations keep no state but their config: their memory is in `Batch.memory`."""

    @abstractmethod
    def plan(self, pending: Sequence[Pending], *, limits: Limits, now_s: float, memory: Mapping[str, float]) -> Batch:
        """Choose a batch.

        Must hold: operations of one model are chosen lowest seq_id first, never past one left behind; all chosen are
        of one kind; only `forward` and `forward_backward` may hold several operations of one model; the tokens fit
        `limits` unless a single operation exceeds it; whatever is pending is chosen after finitely many calls.
        """


C = TypeVar("C", bound=BackendConfig)


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerSpec(Generic[C]):
    name: str
    config: type[C]
    create: Callable[[C], Scheduler]
    description: str = ""
