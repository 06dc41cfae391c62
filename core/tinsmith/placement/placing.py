"""Assigns devices and memory. A pure function of the components and the machine.

A plan is a table with a row for each unit, filled in from left to right: its devices, what it must have of each of
them, and how much more it gets, which follows from the rows on the same device.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from operator import add
from typing import Final, NamedTuple, TypeVar

from tinsmith.backend import Demand, Placement
from tinsmith.errors import ConfigError
from tinsmith.placement.components import Component, ComponentError
from tinsmith.placement.machine import Machine

T = TypeVar("T")

_MORE_DEVICES: Final = (1, 2, 4, 8, 16, 32, 64)


@dataclass(frozen=True, slots=True, kw_only=True)
class Placed:
    """A backend or sampler with its devices, memory and resulting demand."""

    component: Component
    placement: Placement
    demand: Demand

    @property
    def is_elsewhere(self) -> bool:
        """True if its launcher assigns the devices, on this machine or on others."""
        return self.demand.num_devices == 0 and not self.placement.devices and not self.on_host

    @property
    def on_host(self) -> bool:
        """True if it computes on the CPU."""
        return self.demand.on_host and not self.placement.devices


class _TooSmallError(ConfigError):
    """A device has less memory than its users need."""


def place(components: Sequence[Component], machine: Machine) -> list[Placed]:
    """Give each component devices of its own if there are enough, else let them share; then divide the memory.

    Components on the CPU share the machine's.

    Raise ConfigError if too little is left for a component, and say what would fit.
    """
    try:
        return _placed(components, machine)
    except _TooSmallError as error:
        msg = f"{error}; {_what_would_fit(components, machine)}"
        raise ConfigError(msg) from error


def _placed(components: Sequence[Component], machine: Machine) -> list[Placed]:
    units = _units_of(components, machine)
    rows = [_row(unit, devices, machine) for unit, devices in zip(units, _devices(units, machine), strict=True)]
    spare = {pool: _spare(pool, rows) for row in rows for pools in row.pools for pool in pools}
    return [each for row in rows for each in row.placed(spare, machine)]


# Units: a trainer or a sampler, or the two of a model that take turns on the same devices -----------------------------


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


def _units_of(components: Sequence[Component], machine: Machine) -> list[Unit]:
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


# Devices --------------------------------------------------------------------------------------------------------------


def _devices(units: Sequence[Unit], machine: Machine) -> list[tuple[str, ...]]:
    """Return the devices of each unit: those that it names, else some that nobody has named, else shared ones."""
    named = {device for unit in units for device in unit.named}
    free = [device for device in machine.devices if device not in named]
    numbers = [unit.number for unit in units if unit.is_given]
    given = iter(_spread(numbers, free) or _shared(numbers, machine.devices))
    return [next(given) if unit.is_given else unit.named for unit in units]


def _spread(numbers: Sequence[int | None], free: Sequence[str]) -> list[tuple[str, ...]] | None:
    """Give each unit devices of its own; those that take any number divide the rest evenly. None: too few."""
    takers = numbers.count(None)
    rest = len(free) - sum(number or 0 for number in numbers)
    if rest < takers:
        return None
    left, even = iter(free), iter(rest // takers + (n < rest % takers) for n in range(takers))
    return [tuple(islice(left, next(even) if number is None else number)) for number in numbers]


def _shared(numbers: Sequence[int | None], devices: Sequence[str]) -> list[tuple[str, ...]]:
    return [tuple(devices[:number]) for number in numbers]


# Memory ---------------------------------------------------------------------------------------------------------------


class _Pool(NamedTuple):
    """A memory that rows divide: a device, this machine, or for one row alone, devices elsewhere."""

    has: str  # "device 0 has"
    usable: int | None  # bytes. None: not known


@dataclass(frozen=True, slots=True, kw_only=True)
class _Row:
    unit: Unit
    devices: tuple[str, ...]
    least: int  # bytes that the unit must have of each pool
    pools: tuple[tuple[_Pool, ...], ...]  # of each component
    beside: tuple[int, ...]  # bytes that the other component of the unit keeps there in its sleep, for each component

    def placed(self, spare: Mapping[_Pool, int | None], machine: Machine) -> Iterator[Placed]:
        for component, pools, beside in zip(self.unit.components, self.pools, self.beside, strict=True):
            more = [size for pool in pools if (size := spare[pool]) is not None]
            memory = component.wanted.memory or (self.least - beside + min(more) if more else None)
            placement = Placement(devices=self.devices, memory_bytes=memory, device_bytes=machine.device_bytes)
            yield Placed(component=component, placement=placement, demand=component.demand(placement))


def _row(unit: Unit, devices: tuple[str, ...], machine: Machine) -> _Row:
    placement = Placement(devices=devices, device_bytes=machine.device_bytes)
    demands = [(component, component.demand(placement)) for component in unit.components]
    least = [_least(*each) for each in demands]
    asleep = [_asleep(*each) for each in demands] if len(demands) > 1 else [0]
    beside = tuple(sum(asleep) - own for own in asleep)
    return _Row(
        unit=unit,
        devices=devices,
        least=max(map(add, least, beside)),
        pools=tuple(_pools(component, devices, demand, machine) for component, demand in demands),
        beside=beside,
    )


def _pools(component: Component, devices: Sequence[str], demand: Demand, machine: Machine) -> tuple[_Pool, ...]:
    if devices:
        return tuple(_Pool(f"device {device} has", machine.usable_bytes) for device in devices)
    if demand.on_host:
        total = gib(machine.host_bytes or 0)
        return (_Pool(f"this machine, or its container, has {total} of memory and", machine.usable_host_bytes),)
    usable = machine.usable_bytes if machine.others_alike else None
    return (_Pool(f"a device elsewhere for {component.name} has", usable),)


def _least(component: Component, demand: Demand) -> int:
    given, least = component.wanted.memory, demand.least_bytes
    if given is not None and given < least:
        msg = f"{component.name}: memory is {gib(given)}; it needs at least {gib(least)} of each device"
        raise ConfigError(msg)
    return given or least


def _asleep(component: Component, demand: Demand) -> int:
    if demand.asleep_bytes is None:
        msg = (
            f"{component.name} cannot sleep, but turns of the model are enabled; disable them, or choose another plugin"
        )
        raise ComponentError(msg, component.model)
    return demand.asleep_bytes


def _spare(pool: _Pool, table: Sequence[_Row]) -> int | None:
    """Return how much more than it must have each row gets there that leaves its memory open. None: not known."""
    rows = [row for row in table if any(pool in pools for pools in row.pools)]
    still_open, needed = sum(row.unit.is_open for row in rows), sum(row.least for row in rows)
    if pool.usable is None:
        if still_open:
            _refuse_if_shared(pool, rows)
        return None
    if needed > pool.usable:
        needs = " and ".join(f"{row.unit.name} {gib(row.least)}" for row in rows)
        has = f"{pool.has} {gib(pool.usable)} to give"
        msg = f"{has}, and what is to run on it needs at least {gib(needed)}: {needs}"
        raise _TooSmallError(msg)
    return (pool.usable - needed) // max(1, still_open)


def _refuse_if_shared(pool: _Pool, rows: Sequence[_Row]) -> None:
    sharing = [component.name for row in rows if row.devices for component in row.unit.components]
    if len(sharing) > 1:
        device = pool.has.removesuffix(" has")
        msg = f"{' and '.join(sharing)} share {device}, whose memory is not known: set `memory` for each"
        raise ConfigError(msg)


def _what_would_fit(components: Sequence[Component], machine: Machine) -> str:
    """Try the same with turns, and with more devices, if there are any."""
    if not machine.devices:
        return "give it more memory, serve fewer models, or make them smaller with the backends' settings"
    return _more_devices(components, machine) + _or_turns(components, machine)


def _more_devices(components: Sequence[Component], machine: Machine) -> str:
    if any(component.wanted.devices is not None for component in components):
        return "let fewer share a device, or leave out `devices`"
    for number in _MORE_DEVICES:
        if number > len(machine.devices) and _fits(
            components, replace(machine, devices=tuple(map(str, range(number))))
        ):
            return f"{number} such devices would do"
    return "no number of such devices would do with these settings"


def _or_turns(components: Sequence[Component], machine: Machine) -> str:
    """Name the turns if with them all fits on these devices."""
    pairs = Counter(component.index for component in components)
    taking = [replace(component, by_turns=component.by_turns or pairs[component.index] > 1) for component in components]
    if taking == list(components) or not _fits(taking, machine):
        return ""
    return ", or these by turns (`turns: {enabled: true}` of the model)"


def _fits(components: Sequence[Component], machine: Machine) -> bool:
    try:
        _placed(components, machine)
    except ConfigError:
        return False
    return True


def gib(size: int) -> str:
    return f"{size / 2**30:.1f} GiB"
