"""The store, for the REST server: sampling sessions."""

from abc import ABC, abstractmethod

from tinsmith.store.old_names import TakesOldNames
from tinsmith.store.records import SamplingSessionRecord


class SamplingSessions(TakesOldNames, ABC):
    @abstractmethod
    async def create_sampling_session(self, sampler: SamplingSessionRecord) -> SamplingSessionRecord:
        """Insert the sampling session. A second call with the same sampling_session_id returns the first one."""

    @abstractmethod
    async def get_sampling_session(self, sampling_session_id: str) -> SamplingSessionRecord: ...

    @abstractmethod
    async def list_sampling_sessions(self, session_id: str) -> list[SamplingSessionRecord]:
        """Return the sampling sessions of a session, oldest first."""
