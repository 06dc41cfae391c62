"""The store, for the REST server: models, which the REST API calls training runs."""

from abc import ABC, abstractmethod

from tinsmith.store.records import NewOperation, RunRecord


class Runs(ABC):
    @abstractmethod
    async def create_run(self, run: RunRecord, operation: NewOperation) -> str:
        """Insert the run and submit its creation (seq_id 0) in one transaction. Return the request_id.

        A repeat returns the first request_id.
        """

    @abstractmethod
    async def count_live_models(self, tenant: str) -> int:
        """Return how many of a tenant's models are created or being created."""

    @abstractmethod
    async def get_run(self, model_id: str) -> RunRecord: ...

    @abstractmethod
    async def list_runs(
        self, tenant: str | None, *, session_id: str | None = None, limit: int, offset: int
    ) -> tuple[list[RunRecord], int]:
        """Return one page of runs, newest first, and the total number of runs."""
