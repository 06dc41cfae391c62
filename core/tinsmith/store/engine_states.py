"""The store, for engines, supervisors and the REST server: what each engine last reported of itself."""

from abc import ABC, abstractmethod
from datetime import datetime

from tinsmith.store.records import EngineRecord, Lease, ReportedFigures


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

    @abstractmethod
    async def overdue_engines(self) -> dict[str, float]:
        """Return, by engine_id, how many seconds ago each lease ran out that was not released."""

    @abstractmethod
    async def running_since(self) -> dict[str, datetime]:
        """Return, by base model, when its engine took the oldest of the operations that it is running."""

    @abstractmethod
    async def report_figures(self, lease: Lease, report: bytes) -> None:
        """Replace what the engine of a base model counts: `tinsmith.figures.Report`, encoded.

        A power cut may undo it.
        """

    @abstractmethod
    async def list_figures(self) -> list[ReportedFigures]:
        """Return what each engine reported last, also one that has ended."""
