"""The store, for the REST server: submit operations to the log, and wait for their results."""

from abc import ABC, abstractmethod

from tinsmith.store.records import FinishedSamples, NewOperation, OperationRecord, PendingCounts, PendingWork, Waiting


class ServerLog(ABC):
    @abstractmethod
    async def submit(self, operation: NewOperation) -> str:
        """Record the operation durably, and return its request_id.

        A repeat (same subject_id, seq_id and digest) returns the first request_id; another digest raises
        ConflictError. An operation that cannot run is recorded as failed at once: its model is lost, or its engine
        has been given up. The exception is an operation of a model that exists; it waits for the next engine.
        Raise NotFoundError if the model does not exist, UserError if its session has ended.
        """

    @abstractmethod
    async def get_operation(self, request_id: str) -> OperationRecord:
        """Raise ResultExpiredError if retention has removed the operation."""

    @abstractmethod
    async def wait_for(self, request_id: str, timeout_s: float) -> OperationRecord:
        """Return the operation as soon as it is finished, or as it stands after `timeout_s`."""

    @abstractmethod
    async def finished_samples(
        self, sampling_session_id: str, clone: int, *, after: int, limit: int, timeout_s: float
    ) -> FinishedSamples:
        """Return at most `limit` entries behind the cursor `after` (0 is the start), in order.

        If there are none yet, wait for one, up to `timeout_s`. An operation that succeeds, fails or is cancelled gets
        its place in the transaction that finishes it; if one transaction finishes several, they keep their order of
        arrival. Entries become visible in this order, whichever process finishes them, so nothing ever appears behind
        a cursor. An entry outlives its operation by hours: a client that was away learns that a result is gone
        instead of waiting for it. Raise UserError if the cursor is ahead of everything recorded.
        """

    @abstractmethod
    async def waiting(self, request_id: str) -> Waiting:
        """Return why the operation is still pending."""

    @abstractmethod
    async def pending(self, tenant: str) -> PendingCounts:
        """Return what a tenant has queued or running."""

    @abstractmethod
    async def list_pending(self) -> list[PendingWork]:
        """Return what is queued or running of all tenants, by base model, tenant, kind and state."""

    @abstractmethod
    async def is_awaited(self, model_id: str, seq_id: int) -> bool:
        """Return whether operations of the model wait with a higher seq_id."""

    @abstractmethod
    async def cancel(self, request_id: str) -> OperationRecord:
        """Cancel an unordered operation that is queued or running; leave any other as it is."""
