"""Accounts: API keys, the audit log, usage and storage."""

from datetime import datetime
from typing import Annotated

from pydantic import AfterValidator, BaseModel, Field, StringConstraints

from tinsmith.protocol import bounds
from tinsmith.protocol.wire.fields import ExactBody


class OrgDetails(BaseModel):
    name: str


class UserDetails(BaseModel):
    email: str


class KeyDetails(BaseModel):
    org_details: OrgDetails
    user_details: UserDetails


class ApiKeyInfo(BaseModel):
    key_id: int
    name: str
    note: str
    details: KeyDetails


KeyText = Annotated[str, StringConstraints(max_length=200), AfterValidator(bounds.plain)]


class NewApiKey(ExactBody):
    name: Annotated[KeyText, Field(min_length=1)]
    note: KeyText = ""
    expires_in_s: Annotated[float, Field(gt=0, le=10 * 365 * 86400)] | None = None  # default: with what makes it


class ApiKey(BaseModel):
    key_id: str
    name: str
    note: str
    tenant: str
    created_at: datetime
    expires_at: datetime | None = None
    account: str | None = None  # of whoever made it while signed in: it ends with that
    key: str | None = None  # of a new one only: it is kept nowhere


class ApiKeys(BaseModel):
    api_keys: list[ApiKey]


class AuditLogEntry(BaseModel):
    timestamp: datetime
    event: str
    event_details: dict[str, str]
    model_id: str | None = None
    tinker_path: str | None = None


class AuditLog(BaseModel):
    entries: list[AuditLogEntry]
    next_offset: int | None = None  # of the following entries, if there are more


class DiskUsageItem(BaseModel):
    """The storage of one tenant on the server's disk and in its database, and its limit."""

    tenant: str
    log_bytes: int
    checkpoint_bytes: int
    snapshot_bytes: int
    recovery_point_bytes: int
    routed_expert_bytes: int
    metric_bytes: int
    description_bytes: int
    total_bytes: int
    allowed_bytes: int


class DiskUsage(BaseModel):
    data: list[DiskUsageItem]
    free_bytes: int
    reserve_bytes: int
