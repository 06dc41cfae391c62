"""The plan of a whole configuration, and the settings of each section that come of it."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from tinsmith.backend import Placement
from tinsmith.placement.components import ComponentError, components_of, roles_of
from tinsmith.placement.machine import Machine, this_machine
from tinsmith.placement.placing import Placed, place
from tinsmith.plugins.loading import Plugins
from tinsmith.settings import DeviceSettings, ModelSettings, PluginSection, Settings
from tinsmith_checkpoints.values import Json


def make_plan(settings: Settings, plugins: Plugins, machine: Machine, models: Collection[str]) -> list[Placed]:
    """Place the trainers and samplers of these models. Without a GPU, and if nothing is set, those that use the CPU.

    Raise ConfigError if something does not fit.
    """
    components = components_of(settings, plugins, models)
    asked = any(component.wanted != DeviceSettings() for component in components)
    if not machine.devices and not asked:
        components = [
            component
            for component in components
            if machine.host_bytes is not None and component.demand(Placement()).on_host
        ]
    return place(components, machine)


def make_plan_of_sound(
    settings: Settings, plugins: Plugins, machine: Machine, models: Collection[str]
) -> tuple[list[Placed], dict[str, str]]:
    """Plan without the models whose trainer or sampler cannot work as configured. Return why, by model.

    Raise ConfigError if the others do not fit.
    """
    left, faults = list(models), dict[str, str]()
    while True:
        try:
            return make_plan(settings, plugins, machine, left), faults
        except ComponentError as error:
            faults[error.model] = str(error)
            left.remove(error.model)


def with_rank(settings: Settings, plugins: Plugins, rank: int) -> Settings:
    """Set `max_lora_rank` in every section whose plugin has such a setting."""
    models = []
    for model in settings.models:
        sections: dict[str, PluginSection] = {}
        for role, spec, section in roles_of(model, plugins):
            if "max_lora_rank" in spec.config.model_fields:
                options = {} if section is None else section.model_dump()
                ranked = {"plugin": spec.name, **options, "max_lora_rank": rank}
                sections[role] = PluginSection.model_validate(ranked)
        models.append(model.model_copy(update=sections))
    return settings.model_copy(update={"models": tuple(models)})


def with_placement(settings: Settings, plan: Sequence[Placed]) -> Settings:
    """Write what the plan assigns into the sections, so that an engine finds it there."""
    models = list(settings.models)
    for placed in plan:
        index = placed.component.index
        models[index] = _told(models[index], placed)
    return settings.model_copy(update={"models": tuple(models)})


def as_told(settings: Settings, plugins: Plugins, model: str) -> list[Placed]:
    """Return the plan of one model as `with_placement` has written it: what trainer and sampler were told.

    Without those that were told nothing. Raise ConfigError if the model's configuration cannot be read.
    """
    plan = []
    for component in components_of(settings, plugins, [model]):
        devices, memory = component.named, component.wanted.memory
        if memory is not None:
            device_bytes = this_machine().device_bytes if devices else None
            placement = Placement(devices=devices, memory_bytes=memory, device_bytes=device_bytes)
            plan.append(Placed(component=component, placement=placement, demand=component.demand(placement)))
    return plan


def _told(model: ModelSettings, placed: Placed) -> ModelSettings:
    section = model.backend if placed.component.role == "backend" else model.sampler
    before = {"plugin": placed.component.spec.name} if section is None else section.model_dump()
    given: dict[str, Json] = {}
    if placed.placement.devices:
        given["devices"] = list(placed.placement.devices)
    if placed.placement.memory_bytes is not None:
        given["memory"] = placed.placement.memory_bytes
    return model.model_copy(update={placed.component.role: PluginSection.model_validate({**before, **given})})
