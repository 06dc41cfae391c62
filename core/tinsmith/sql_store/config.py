"""Settings of the SQL store. This module imports no database library, because every process loads it."""

from typing import Literal

from pydantic import Field

from tinsmith.backend import BackendConfig
from tinsmith.settings.secrets import Secret


class SqlStoreConfig(BackendConfig):
    """The `store:` section with `plugin: sql`."""

    url: Secret | None = Field(
        None, description="SQLAlchemy URL of the database; default: SQLite in the data directory"
    )
    synchronous: Literal["full", "normal", "off"] = Field(
        "full",
        description="what acknowledged requests survive: `full` a power cut, `normal` and `off` a killed process",
    )
    max_value_bytes: int = Field(
        256 << 20,
        ge=1 << 20,
        le=999_000_000,
        description="size in bytes of the largest request or result that is stored; a request that is larger, or whose "
        "result could be, is refused; SQLite and PostgreSQL store no values over 1 GB",
    )
    max_readers: int = Field(4, ge=1, le=64, description="number of connections for reading, per process")
    busy_timeout_s: float = Field(
        30.0, gt=0, description="SQLite: seconds for which a write waits for other processes' writes"
    )
    outage_s: float = Field(
        30.0, gt=0, description="PostgreSQL: seconds for which calls wait for a database that cannot be reached"
    )
    safety_poll_s: float = Field(
        2.0, gt=0, description="seconds after which waiting calls read the database even without a wake-up"
    )
