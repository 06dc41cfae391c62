"""The store, for an engine: leases, so that at most one engine of a base model records anything."""

from abc import ABC, abstractmethod

from tinsmith.store.records import Lease, LeaseHeld


class Leases(ABC):
    @abstractmethod
    async def acquire_lease(
        self, base_model: str, *, engine_id: str, duration_s: float, dead: str | None = None
    ) -> Lease | LeaseHeld:
        """Take the lease if it is free, was released, or has expired. It is durable, and its epoch only grows.

        `dead` names an engine known to have ended; its lease counts as released. An engine that already holds the
        lease renews it.
        """

    @abstractmethod
    async def renew_lease(self, lease: Lease) -> None:
        """Extend the lease to `duration_s` from now, even if it had expired but was not taken over.

        Raise LeaseLostError if another engine has taken it over, or if it was released.
        """

    @abstractmethod
    async def release_lease(self, base_model: str, engine_id: str) -> None:
        """Release the lease if this engine holds it, and wake the engines that wait for it."""

    @abstractmethod
    async def wait_for_lease(self, base_model: str, timeout_s: float) -> None:
        """Return when the lease may have been released, or after `timeout_s`."""
