"""The store, for people: what a model's log holds. `tinsmith runs` and `tinsmith replay` read it."""

from abc import ABC, abstractmethod

from tinsmith.store.records import LoggedOperation, LogTotals, RunLog


class LogInspection(ABC):
    @abstractmethod
    async def run_log(self, model_id: str) -> RunLog:
        """Return where the model's log begins, and its recovery points."""

    @abstractmethod
    async def list_log(self, model_id: str, *, from_seq_id: int | None, limit: int) -> list[LoggedOperation]:
        """Return operations in order, from `from_seq_id` on; None returns the last ones."""

    @abstractmethod
    async def log_totals(self, model_id: str) -> list[LogTotals]:
        """Return one entry for each kind and state in the log, sorted by kind."""
