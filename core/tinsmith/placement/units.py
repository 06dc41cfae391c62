"""The units of placement: a trainer or a sampler, or the two of a model that take turns on the same devices."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

from tinsmith.backend import Placement
from tinsmith.errors import ConfigError
from tinsmith.placement.components import Component
from tinsmith.placement.machine import Machine

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Unit:
    components: tuple[Component, ...]
    named: tuple[str, ...]  # the devices that the configuration names; if it names none, ...
    number: int | None  # ... how many it takes of this machine. None: any number

    @property
    def name(self) -> str:
        return " by turns with ".join(component.name for component in self.components)

    @property
    def is_given(self) -> bool:
        """Whether placement chooses its devices."""
        return not self.named and self.number != 0

    @property
    def is_open(self) -> bool:
        """Whether the configuration leaves some of its memory to placement."""
        return any(component.wanted.memory is None for component in self.components)


def units_of(components: Sequence[Component], machine: Machine) -> list[Unit]:
    """Return the units in order. Raise ConfigError if what one asks for is not there, or contradicts itself."""
    together: dict[tuple[int, str], list[Component]] = {}
    for component in components:
        together.setdefault((component.index, "" if component.by_turns else component.role), []).append(component)
    return [_unit(tuple(members), machine) for members in together.values()]


def _unit(components: tuple[Component, ...], machine: Machine) -> Unit:
    named = _agreed(components, [component.named or None for component in components])
    return Unit(
        components=components,
        named=named or (),
        number=_agreed(components, [_number(component, machine) for component in components]),
    )


def _agreed(components: Sequence[Component], wishes: Sequence[T | None]) -> T | None:
    """Return the devices, or their number, that the components ask for. None: none does."""
    said = {wish for wish in wishes if wish is not None}
    if len(said) > 1 or (said == {0} and None in wishes):  # 0: its devices are elsewhere
        asked = " and ".join(
            f"{component.name} asks for {_in_words(wish)}" for component, wish in zip(components, wishes, strict=True)
        )
        msg = f"turns are for devices that both use, but {asked}; give both the same `devices`, or disable the turns"
        raise ConfigError(msg)
    return next(iter(said), None)


def _in_words(wish: object) -> str:
    """Describe devices, or their number."""
    if isinstance(wish, tuple):
        return f"devices {', '.join(wish)}"
    return "any number" if wish is None else "none of this machine" if wish == 0 else str(wish)


def _number(component: Component, machine: Machine) -> int | None:
    """Return how many devices of this machine the component takes; None: any number."""
    given = _given(component)
    asked = component.demand(Placement(devices=given or (), device_bytes=machine.device_bytes)).num_devices
    number = asked if given is None else len(given)
    if asked not in (None, number):
        msg = f"{component.name}: devices gives it {number}, its other settings ask for {asked}"
        raise ConfigError(msg)
    missing = _missing(component.named, number or 0, machine)
    if missing and (given or machine.devices):
        msg = f"{component.name} asks for {missing}; this machine has {', '.join(machine.devices) or 'none'}"
        raise ConfigError(msg)
    return number if machine.devices else 0  # without a GPU, a backend may find other hardware


def _given(component: Component) -> tuple[str, ...] | None:
    """Return devices like those that the configuration gives it; None: it leaves them open."""
    wanted = component.wanted.devices
    return tuple(map(str, range(wanted))) if isinstance(wanted, int) else wanted


def _missing(named: Sequence[str], number: int, machine: Machine) -> str:
    """Say which devices are not there. GPUs may also be named by their UUID."""
    unknown = [each for each in named if each not in machine.devices and not each.startswith(("GPU-", "MIG-"))]
    if unknown:
        return f"devices {', '.join(unknown)}"
    return f"{number} devices" if number > max(len(machine.devices), len(named)) else ""
