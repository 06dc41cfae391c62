"""The store, for engines, supervisors and the REST server: what each engine last reported of itself."""

from abc import ABC, abstractmethod

from tinsmith.store.records import EngineRecord, Lease


class EngineStates(ABC):
    @abstractmethod
    async def report_engine(self, record: EngineRecord, *, lease: Lease | None = None) -> None:
        """Replace the record of the engine's base model.

        A report without a lease comes from a supervisor; it is ignored while an engine holds the lease. With a lease,
        raise LeaseLostError once another engine has taken it over.

        State FAILED fails everything pending for the base model, with `detail` in the error. Operations of models that
        exist are kept, and continue when an engine starts again.
        """

    @abstractmethod
    async def list_engines(self) -> list[EngineRecord]: ...
