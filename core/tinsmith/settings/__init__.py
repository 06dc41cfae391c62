"""What can be configured (`schema`), and where values come from (`sources`)."""

from tinsmith.settings.schema import (
    ApiKey,
    ConsistencySettings,
    ModelSettings,
    PluginSection,
    RecoverySettings,
    ServerSettings,
    Settings,
    SupervisorSettings,
)

__all__ = [
    "ApiKey",
    "ConsistencySettings",
    "ModelSettings",
    "PluginSection",
    "RecoverySettings",
    "ServerSettings",
    "Settings",
    "SupervisorSettings",
]
