"""The store, for the REST server: clients' sessions."""

from abc import ABC, abstractmethod
from collections.abc import Collection
from datetime import datetime, timedelta
from typing import Final

from tinsmith.store.records import SessionEnd, SessionRecord

SILENCE: Final = timedelta(seconds=30)
"""A client sends a heartbeat every 10 s. If none arrives for longer than this, the server may be at fault."""


class Sessions(ABC):
    @abstractmethod
    async def create_session(self, session: SessionRecord, *, idempotency_key: str | None) -> SessionRecord:
        """Insert the session. A second call with the same tenant and key returns the first session."""

    @abstractmethod
    async def get_session(self, session_id: str) -> SessionRecord: ...

    @abstractmethod
    async def find_sessions(self, session_ids: Collection[str]) -> dict[str, SessionRecord]:
        """Return those of these sessions that exist, by their ids: up to 1,000 in one read."""

    @abstractmethod
    async def list_sessions(self, tenant: str | None, *, limit: int, offset: int) -> list[SessionRecord]:
        """Return sessions, newest first. `tenant` None lists every tenant's."""

    @abstractmethod
    async def count_live_sessions(self, tenant: str) -> int:
        """Return how many of a tenant's sessions have not ended."""

    @abstractmethod
    async def hear_session(self, session_id: str, at: datetime, *, server_id: str | None = None) -> SessionRecord:
        """Record a heartbeat, and which server heard it. A session that has ended stays as it is."""

    @abstractmethod
    async def update_session(self, session_id: str, *, project_id: str | None) -> SessionRecord: ...

    @abstractmethod
    async def end_session(self, session_id: str, reason: SessionEnd, detail: str | None) -> SessionRecord:
        """Record the end, and queue an UnloadModel behind each live model's last operation.

        The first reason wins.
        """

    @abstractmethod
    async def unload_run(self, model_id: str) -> str:
        """Queue an UnloadModel behind a model's last operation, and return its request_id; a repeat gets the first one.

        Later requests are refused, and what waits behind a missing seq_id fails. Raise UserError if the model is lost.
        """

    @abstractmethod
    async def forget_sessions(self, last_seen_before: datetime) -> int:
        """Delete sessions that have ended and were last heard before then, with all that they own.

        A sampling session is kept while the log holds samples of it; a model while it is live, or has operations in the
        log or checkpoints; a session while it has models or sampling sessions. Return how many sessions, models and
        sampling sessions were deleted.
        """

    @abstractmethod
    async def expire_sessions(self, last_seen_before: datetime, *, heard_by: str | None = None) -> list[str]:
        """End the sessions without a heartbeat since then, with reason "expired". Return their ids.

        With `heard_by`, only those that this server heard last, if several servers may share the store.
        """
