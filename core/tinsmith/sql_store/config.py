"""Settings of the SQL store. Imports no database library, since every process loads it."""

from typing import Literal

from pydantic import Field

from tinsmith.backend import BackendConfig


class SqlStoreConfig(BackendConfig):
    """The `store:` section where `plugin: sql`."""

    url: str | None = Field(None, description="an SQLAlchemy URL; default: SQLite in the data directory")
    synchronous: Literal["full", "normal", "off"] = Field(
        "full",
        description="what an acknowledged write survives: full = a power cut, normal and off = a killed process",
    )
    max_readers: int = Field(4, ge=1, le=64, description="connections for reading, per process")
    busy_timeout_s: float = Field(30.0, gt=0, description="how long a write waits for another process's")
    outage_s: float = Field(
        30.0, gt=0, description="PostgreSQL: how long calls wait for a database that cannot be reached"
    )
    rewrite_share: float = Field(
        0.02,
        ge=0,
        le=1,
        description="PostgreSQL: share of the time in which tables may be locked to rewrite them without what was "
        "deleted; 0: never",
    )
    safety_poll_s: float = Field(
        2.0, gt=0, description="how often waiting calls look at the database although no wake-up came"
    )
