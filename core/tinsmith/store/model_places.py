"""The store, for an engine: places for models on its backend, and the models that wait for one.

A backend holds a limited number of models. A model whose run was created with `next_seq_id` WAITS_FOR_PLACE waits: none
of its operations can be claimed until the engine admits it.
"""

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime

from tinsmith.store.records import Lease, PlaceLimits, PlaceWait


class ModelPlaces(ABC):
    @abstractmethod
    async def admit_models(self, lease: Lease, limits: PlaceLimits) -> None:
        """Give the free places to models that wait, and fail those that have waited for too long.

        A place is taken from the admission of a model until it is unloaded or lost. The tenant with the fewest places
        is next, with the model that has waited longest. The last `limits.kept` places go only to tenants that have
        none. At most `limits.max_full_models` models with LoRA rank 0 have a place; one that waits for that holds up no
        other. Raise LeaseLostError if another engine has taken over.
        """

    @abstractmethod
    async def wait_for_places(self, base_model: str, timeout_s: float) -> None:
        """Return when a place may have become free or a model may have begun to wait, or after `timeout_s`."""


@dataclass(frozen=True, slots=True)
class Applicant:
    """A model that waits for a place."""

    model_id: str
    tenant: str
    since: datetime
    full: bool = False  # all weights are trained


@dataclass(frozen=True, slots=True)
class Taken:
    """The places that are taken."""

    by_tenant: Counter[str]
    full: int = 0  # by models with all weights trained


def next_ones(waiting: Sequence[Applicant], taken: Taken, limits: PlaceLimits) -> Iterator[Applicant]:
    """Yield the models that get the free places; `waiting` begins with the model that has waited longest."""
    waiting, by_tenant, full = list(waiting), taken.by_tenant.copy(), taken.full
    while (free := limits.max_models - by_tenant.total()) > 0:
        full_is_free = limits.max_full_models is None or full < limits.max_full_models
        able = [
            each
            for each in waiting
            if (full_is_free or not each.full) and (free > limits.kept or not by_tenant[each.tenant])
        ]
        if not able:
            return
        chosen = min(able, key=lambda each: (by_tenant[each.tenant], each.since))
        yield chosen
        waiting.remove(chosen)
        by_tenant[chosen.tenant] += 1
        full += chosen.full


def place_wait(model_id: str, tenant: str, waiting: Sequence[Applicant], taken: Taken) -> PlaceWait:
    """Return what a model that waits for a place waits for."""
    return PlaceWait(
        taken=taken.by_tenant.total(),
        taken_by_tenant=taken.by_tenant[tenant],
        num_waiting=len(waiting),
        taken_full=taken.full if any(each.full for each in waiting if each.model_id == model_id) else None,
    )
