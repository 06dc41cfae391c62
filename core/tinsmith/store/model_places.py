"""The store, for an engine: places for models on its backend, and the models that wait for one.

A backend holds a limited number of models. A model whose run was created with `next_seq_id` WAITS_FOR_PLACE waits: none
of its operations can be claimed until the engine admits it.
"""

from abc import ABC, abstractmethod

from tinsmith.store.records import Lease, PlaceLimits


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
