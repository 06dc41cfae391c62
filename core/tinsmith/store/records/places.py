"""Places of models on a backend."""

from dataclasses import dataclass
from datetime import datetime


@dataclass(frozen=True, slots=True, kw_only=True)
class PlaceLimits:
    """How many models a backend holds, and for whom."""

    max_models: int
    kept: int  # places that only tenants without a model may take
    give_up_before: datetime  # models that have waited since before then fail
    failure: str  # what they fail with
    max_full_models: int | None = None  # how many models with LoRA rank 0; None: as many as `max_models`
    idle_since: datetime | None = None  # a model that has been idle since before then may be parked; None: none may
    staying: frozenset[str] = frozenset()  # models that are not parked now
    freed_for: frozenset[str] = frozenset()  # models for which others were parked: no kept place is kept from them


@dataclass(frozen=True, slots=True, kw_only=True)
class Parking:
    """A model that is to be parked, and the one that needs its place."""

    model_id: str
    tenant: str
    seq_id: int  # its last operation, whose result is recorded
    for_model_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PlaceMoves:
    """What an engine has to do before waiting models can go on."""

    park: tuple[Parking, ...] = ()
    come_back: tuple[str, ...] = ()  # parked models that have a place again
    waiting: bool = False  # whether any model waits, these included


@dataclass(frozen=True, slots=True, kw_only=True)
class PlaceCounts:
    """Models with a place on a backend, and models that wait for one."""

    taken: int
    waiting: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PlaceWait:
    """Why a model still waits for a place on the backend."""

    taken: int  # places
    taken_by_tenant: int  # by models of the same tenant
    num_waiting: int  # models, this one included
    taken_full: int | None = None  # places of models with LoRA rank 0; None if this model is not one of them
    parked: bool = False  # it had a place before, and waits for one again
