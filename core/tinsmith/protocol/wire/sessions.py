"""Sessions of clients."""

from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, Field

from tinsmith.protocol import bounds
from tinsmith.protocol.wire.fields import Body, JsonMetadata, Name


class CreateSessionRequest(Body):
    tags: Annotated[list[Name], Field(max_length=bounds.MAX_TAGS, fail_fast=True)] = []
    user_metadata: JsonMetadata | None = None
    sdk_version: Name | None = None
    project_id: Name | None = None
    display_name: Name | None = None


class SessionCreated(BaseModel):
    session_id: str
    warning_message: str | None = None  # the SDK prints it
    error_message: str | None = None  # likewise
    type: Literal["create_session"] = "create_session"


class SessionRequest(Body):
    """Of session_heartbeat."""

    session_id: Name


class SessionHeartbeat(BaseModel):
    type: Literal["session_heartbeat"] = "session_heartbeat"


class FinishReason(Body):
    type: Literal["success", "errored", "interrupted"]


class FinishSessionRequest(Body):
    reason: FinishReason
    detail: Annotated[str, AfterValidator(bounds.shortened)] | None = None


class ProjectRequest(Body):
    project_id: Name


class SessionList(BaseModel):
    sessions: list[str]


class Session(BaseModel):
    training_run_ids: list[str]
    sampler_ids: list[str]
    user_metadata: dict[str, str] | None = None
    display_name: str | None = None
