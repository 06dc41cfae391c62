"""Clients' sessions."""

from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Final, Literal

from tinsmith_checkpoints.values import Json

SILENCE: Final = timedelta(seconds=30)
"""A client sends a heartbeat every 10 s. If none arrives for longer than this, the server may be at fault."""

Metadata = dict[str, Json]
Position = tuple[datetime, str]
"""Of a session or a checkpoint in a list that is newest first: its creation, and its id or path."""

SessionEnd = Literal["success", "errored", "interrupted", "expired"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionRecord:
    session_id: str
    tenant: str
    created_at: datetime
    last_seen_at: datetime
    tags: tuple[str, ...] = ()
    user_metadata: Metadata | None = None
    sdk_version: str | None = None
    project_id: str | None = None
    display_name: str | None = None
    ended: SessionEnd | None = None
    end_detail: str | None = None
    heard_by: str | None = None  # the server that heard the last heartbeat

    @property
    def described(self) -> tuple[object, ...]:
        """What the client says of it."""
        return self.tags, self.user_metadata, self.sdk_version, self.project_id, self.display_name
