"""The trainers and samplers of a configuration, each with the devices and memory it asks for."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from tinsmith.backend import AnyBackendSpec, AnySamplerSpec, BackendConfig, Demand, Placement
from tinsmith.errors import ConfigError
from tinsmith.plugins.loading import Plugins
from tinsmith.settings import DeviceSettings, ModelSettings, PluginSection, Settings
from tinsmith_checkpoints.huggingface import known_config, read_model_config
from tinsmith_checkpoints.values import Json

Role = Literal["backend", "sampler"]
AnySpec = AnyBackendSpec | AnySamplerSpec


class ComponentError(ConfigError):
    """A trainer or sampler cannot work as configured, on whatever machine."""

    def __init__(self, message: str, model: str) -> None:
        super().__init__(message)
        self.model = model


@dataclass(frozen=True, slots=True, kw_only=True)
class Component:
    """A trainer or a sampler that can be told where to run."""

    index: int  # of its model in the configuration
    model: str
    role: Role
    spec: AnySpec
    config: BackendConfig
    wanted: DeviceSettings
    samples: bool  # False: a trainer with a separate sampler beside it
    by_turns: bool = False  # shares its devices by turns with the other component of its model
    shape: Mapping[str, Any] | None  # the model's parsed config.json (Any: JSON); None: not known yet

    @property
    def name(self) -> str:
        return f"{self.role} {self.spec.name} of {self.model!r}"

    @property
    def named(self) -> tuple[str, ...]:
        """The devices that the configuration names."""
        return self.wanted.devices if isinstance(self.wanted.devices, tuple) else ()

    def demand(self, placement: Placement) -> Demand:
        """Ask the plugin. Raise PartError with the component's name."""
        assert self.spec.demand is not None
        try:
            return self.spec.demand(self.config, self.shape, replace(placement, samples=self.samples))
        except ConfigError as error:
            msg = f"{self.name}: {error}"
            raise ComponentError(msg, self.model) from error


def components_of(settings: Settings, plugins: Plugins, models: Collection[str]) -> list[Component]:
    """Return every trainer and sampler of these models whose plugin states its demand, in order."""
    chosen = [(index, model) for index, model in enumerate(settings.models) if model.name in models]
    return [component for index, model in chosen for component in _components_of_model(index, model, plugins)]


def _components_of_model(index: int, model: ModelSettings, plugins: Plugins) -> Iterator[Component]:
    try:
        shape = model_config(model)
    except ConfigError as error:
        raise ComponentError(str(error), model.name) from error
    for role, spec, section in roles_of(model, plugins):
        if spec.demand is not None:
            yield Component(
                index=index,
                model=model.name,
                role=role,
                spec=spec,
                config=spec.config.model_validate(own_options(section, spec)),
                wanted=device_settings(section, spec),
                samples=role == "sampler" or model.sampler is None,
                by_turns=model.turns.enabled,
                shape=shape,
            )


def roles_of(model: ModelSettings, plugins: Plugins) -> Iterator[tuple[Role, AnySpec, PluginSection | None]]:
    """Yield the model's trainer, and its sampler if that is another plugin, with their sections."""
    trainer = plugins.default_backend() if model.backend is None else plugins.backends.get(model.backend.plugin)
    yield "backend", trainer, model.backend
    if model.sampler is not None:
        yield "sampler", plugins.samplers.get(model.sampler.plugin), model.sampler


def model_config(model: ModelSettings) -> Mapping[str, Json] | None:
    """Read the model's config.json, or return the config of the well-known model with its name."""
    if model.path is not None:
        return read_model_config(model.path)
    return known_config(model.name)


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
