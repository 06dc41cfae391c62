"""The settings (`schema`), the sources of their values (`sources`), secrets, and the data directory."""

from tinsmith.settings.data_dir import DataDir
from tinsmith.settings.environment import child_environment
from tinsmith.settings.schema import (
    ApiKey,
    ConsistencySettings,
    DeviceSettings,
    KeySource,
    LossSettings,
    ModelSettings,
    PluginSection,
    QuotaSettings,
    RecoverySettings,
    RoutingReplaySettings,
    ServerSettings,
    Settings,
    SupervisorSettings,
    TenantQuotas,
    TurnSettings,
    WatchdogSettings,
)

__all__ = [
    "ApiKey",
    "ConsistencySettings",
    "DataDir",
    "DeviceSettings",
    "KeySource",
    "LossSettings",
    "ModelSettings",
    "PluginSection",
    "QuotaSettings",
    "RecoverySettings",
    "RoutingReplaySettings",
    "ServerSettings",
    "Settings",
    "SupervisorSettings",
    "TenantQuotas",
    "TurnSettings",
    "WatchdogSettings",
    "child_environment",
]
