"""Divides a section of the configuration into what core reads, `devices` and `memory`, and the plugin's own options."""

from typing import Any

from tinsmith.backend import AnyBackendSpec, AnySamplerSpec
from tinsmith.settings import DeviceSettings, PluginSection

AnySpec = AnyBackendSpec | AnySamplerSpec


def device_settings(section: PluginSection | None, spec: AnySpec) -> DeviceSettings:
    """Return the keys that are core's. Of a plugin that does not offer `demand`, none is."""
    if section is None or spec.demand is None:
        return DeviceSettings()
    options = section.options()
    return DeviceSettings.model_validate({key: options[key] for key in DeviceSettings.model_fields if key in options})


def own_options(section: PluginSection | None, spec: AnySpec) -> dict[str, Any]:
    """Return the keys that are the plugin's."""
    options = {} if section is None else section.options()
    if spec.demand is None:
        return options
    return {key: value for key, value in options.items() if key not in DeviceSettings.model_fields}
