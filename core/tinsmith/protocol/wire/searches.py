"""Searches of sessions and checkpoints. An unknown filter is refused, since it would let everything pass."""

from datetime import datetime
from typing import Annotated, Literal

from pydantic import AwareDatetime, BaseModel, Field

from tinsmith.protocol import bounds
from tinsmith.protocol.wire.fields import ExactBody, Int, Name, TextMetadata
from tinsmith.protocol.wire.weights import Checkpoint


class OwnSearchOwner(ExactBody):
    type: Literal["own"] = "own"


class AccessibleSearchOwner(ExactBody):
    type: Literal["accessible"]


class UserSearchOwner(ExactBody):
    type: Literal["user"]
    owner_urns: Annotated[list[Name], Field(min_length=1, max_length=bounds.MAX_OWNERS, fail_fast=True)]


SearchOwner = Annotated[OwnSearchOwner | AccessibleSearchOwner | UserSearchOwner, Field(discriminator="type")]
FilterNames = Annotated[list[Name], Field(max_length=bounds.MAX_TAGS, fail_fast=True)]
SearchLimit = Annotated[Int, Field(ge=1, le=bounds.MAX_FOUND)]


class ActiveStatusQuery(ExactBody):
    type: Literal["active"]


class CancelledStatusQuery(ExactBody):
    type: Literal["cancelled"]


class FailedStatusQuery(ExactBody):
    type: Literal["failed"]


class ClientFinishedStatusQuery(ExactBody):
    type: Literal["client_finished"]
    reasons: (
        Annotated[
            list[Literal["success", "errored", "interrupted"]],
            Field(min_length=1, max_length=bounds.MAX_TAGS, fail_fast=True),
        ]
        | None
    ) = None


StatusQuery = Annotated[
    ActiveStatusQuery | CancelledStatusQuery | FailedStatusQuery | ClientFinishedStatusQuery,
    Field(discriminator="type"),
]


class SessionCursor(ExactBody):
    last_created_at: AwareDatetime
    last_session_id: Name


class SessionSearchRequest(ExactBody):
    session_id: Name | None = None
    project_ids: FilterNames | None = None
    user_metadata: TextMetadata = {}
    display_name: Annotated[Name, Field(min_length=1)] | None = None
    owner: SearchOwner = OwnSearchOwner()
    statuses: Annotated[list[StatusQuery], Field(min_length=1, max_length=bounds.MAX_TAGS, fail_fast=True)] | None = (
        None
    )
    limit: SearchLimit = 50
    cursor: SessionCursor | None = None


class ClientFinishReason(BaseModel):
    type: Literal["success", "errored", "interrupted"]


class SessionStatus(BaseModel):
    type: Literal["active", "client_finished"]
    reason: ClientFinishReason | None = None
    detail: str | None = None


class SessionSummary(BaseModel):
    """`status` is missing if the session ended for want of heartbeats."""

    session_id: str
    created_at: datetime
    owner: str
    project_id: str
    status: SessionStatus | None = None
    checkpoints_count: int
    display_name: str | None = None
    user_metadata: dict[str, str] | None = None
    checkpoint_storage_bytes: int | None = None


class SessionSearchResult(BaseModel):
    sessions: list[SessionSummary]
    next_cursor: SessionCursor | None = None


class CheckpointCursor(ExactBody):
    """The hosted service identifies a checkpoint by a UUID, and this server by its path."""

    last_created_at: AwareDatetime
    last_checkpoint_uuid: Name


class CheckpointSearchRequest(ExactBody):
    project_ids: FilterNames | None = None
    user_metadata: TextMetadata = {}
    checkpoint_type: Literal["training", "sampler", "external"] | None = None
    owner: SearchOwner = OwnSearchOwner()
    base_models: FilterNames | None = None
    limit: SearchLimit = 50
    cursor: CheckpointCursor | None = None


class CheckpointSearchResult(BaseModel):
    checkpoints: list[Checkpoint]
    next_cursor: CheckpointCursor | None = None
