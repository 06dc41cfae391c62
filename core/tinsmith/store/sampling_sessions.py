"""The store, for the REST server: sampling sessions."""

from abc import ABC, abstractmethod

from tinsmith.store.records import SamplingSessionRecord


class SamplingSessions(ABC):
    @abstractmethod
    async def create_sampling_session(self, sampler: SamplingSessionRecord) -> SamplingSessionRecord:
        """Insert the sampling session. A second call with the same sampling_session_id returns the first one."""

    @abstractmethod
    async def get_sampling_session(self, sampling_session_id: str) -> SamplingSessionRecord: ...

    @abstractmethod
    async def count_open_sampling_sessions(self, tenant: str) -> int:
        """Return how many sampling sessions a tenant has in sessions that have not ended."""

    @abstractmethod
    async def list_sampling_session_ids(self, session_id: str) -> list[str]:
        """Return the ids of a session's sampling sessions, oldest first: there may be a hundred thousand."""
