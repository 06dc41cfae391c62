"""Assigns devices and memory. A pure function of the parts and the machine."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final, TypeVar

from tinsmith.backend import Demand, Placement
from tinsmith.errors import ConfigError
from tinsmith.placement.machine import Machine
from tinsmith.placement.parts import Part, PartError

_MORE_DEVICES: Final = (1, 2, 4, 8, 16, 32, 64)

_HOST: Final = "host"
"""In the place of devices, of what runs on the CPU."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Placed:
    """A part, what it gets, and what it makes of that."""

    part: Part
    placement: Placement
    demand: Demand

    @property
    def is_elsewhere(self) -> bool:
        """Whether its launcher gives it devices, which may be of this machine or of others."""
        return self.demand.num_devices == 0 and not self.placement.devices and not self.on_host

    @property
    def on_host(self) -> bool:
        """Whether it computes on the CPU."""
        return self.demand.on_host and not self.placement.devices


class _TooSmallError(ConfigError):
    """A device does not have what its users need."""


def place(parts: Sequence[Part], machine: Machine) -> list[Placed]:
    """Give each part devices of its own if there are enough, else let parts share them; then divide the memory.

    Parts on the CPU share the machine's.

    Raise ConfigError if a part cannot work with what is left for it, with what would fit.
    """
    try:
        return _placed(parts, machine)
    except _TooSmallError as error:
        msg = f"{error}; {_what_would_fit(parts, machine)}"
        raise ConfigError(msg) from error


def _placed(parts: Sequence[Part], machine: Machine) -> list[Placed]:
    chosen = _devices(parts, machine)
    memory = _memory(parts, chosen, machine)
    placements = [_placement(devices, own, machine) for devices, own in zip(chosen, memory, strict=True)]
    return [
        Placed(part=part, placement=placement, demand=part.demand(placement))
        for part, placement in zip(parts, placements, strict=True)
    ]


def _placement(devices: tuple[str, ...], memory: int | None, machine: Machine) -> Placement:
    return Placement(devices=devices, memory_bytes=memory, device_bytes=machine.device_bytes)


def _units(parts: Sequence[Part]) -> list[tuple[int, ...]]:
    """Return the indices of the parts, together those that share devices by turns."""
    by_model: dict[object, list[int]] = {}
    for index, part in enumerate(parts):
        by_model.setdefault(part.index if part.by_turns else (part.index, part.role), []).append(index)
    return [tuple(members) for members in by_model.values()]


# Devices --------------------------------------------------------------------------------------------------------------


def _devices(parts: Sequence[Part], machine: Machine) -> list[tuple[str, ...]]:
    """Return the devices of each part: those that it names, else some that nobody has named, else shared ones."""
    units = _units(parts)
    names = [_agreed([_named(parts[i]) or None for i in unit], unit, parts) or () for unit in units]
    numbers = [_agreed([_number(parts[i], machine) for i in unit], unit, parts) for unit in units]
    named = {device for own in names for device in own}
    free = [device for device in machine.devices if device not in named]
    open_units = [number for number, own in enumerate(names) if not own and numbers[number] != 0]
    wanted = [numbers[number] for number in open_units]
    given = _spread(wanted, free) or _shared(wanted, machine.devices)
    chosen = dict(zip(open_units, given, strict=True))
    of_part = {i: chosen.get(number, names[number]) for number, unit in enumerate(units) for i in unit}
    return [of_part[index] for index in range(len(parts))]


def _agreed(wishes: Sequence[T | None], unit: Sequence[int], parts: Sequence[Part]) -> T | None:
    """Return the devices, or their number, that those of a unit ask for. None: none does."""
    said = {wish for wish in wishes if wish is not None}
    if len(said) > 1 or (said == {0} and None in wishes):  # 0: its devices are elsewhere
        asked = " and ".join(
            f"{parts[i].name} asks for {_in_words(wish)}" for i, wish in zip(unit, wishes, strict=True)
        )
        msg = f"turns are for devices that both use, but {asked}; give both the same `devices`, or disable the turns"
        raise ConfigError(msg)
    return next(iter(said), None)


def _in_words(wish: object) -> str:
    """Describe devices, or their number."""
    if isinstance(wish, tuple):
        return f"devices {', '.join(wish)}"
    return "any number" if wish is None else "none of this machine" if wish == 0 else str(wish)


def _named(part: Part) -> tuple[str, ...]:
    return part.wanted.devices if isinstance(part.wanted.devices, tuple) else ()


def _number(part: Part, machine: Machine) -> int | None:
    """Return how many devices of this machine the part takes; None: any number."""
    wanted, named = part.wanted.devices, _named(part)
    given = tuple(map(str, range(wanted))) if isinstance(wanted, int) else named
    asked = part.demand(_placement(given, None, machine)).num_devices
    number = len(given) if given else asked
    if wanted is not None and asked is not None and asked != number:
        msg = f"{part.name}: devices gives it {number}, its other settings ask for {asked}"
        raise ConfigError(msg)
    unknown = [each for each in named if each not in machine.devices and not each.startswith(("GPU-", "MIG-"))]
    if unknown or (number or 0) > max(len(machine.devices), len(named)):
        there = ", ".join(machine.devices) or "none"
        missing = f"devices {', '.join(unknown)}" if unknown else f"{number} devices"
        if wanted is None and not machine.devices:
            return 0  # the settings leave it to the backend, which may find other hardware
        msg = f"{part.name} asks for {missing}; this machine has {there}"
        raise ConfigError(msg)
    return number if machine.devices else 0


def _spread(numbers: Sequence[int | None], free: Sequence[str]) -> list[tuple[str, ...]] | None:
    """Give each part devices of its own; those that take any number divide the rest evenly. None: too few."""
    rest = len(free) - sum(number or 0 for number in numbers)
    takers = sum(number is None for number in numbers)
    if rest < takers:
        return None
    given, start = [], 0
    for number in numbers:
        size = -(-rest // takers) if number is None else number
        if number is None:
            rest, takers = rest - size, takers - 1
        given.append(tuple(free[start : start + size]))
        start += size
    return given


def _shared(numbers: Sequence[int | None], devices: Sequence[str]) -> list[tuple[str, ...]]:
    return [tuple(devices if number is None else devices[:number]) for number in numbers]


# Memory ---------------------------------------------------------------------------------------------------------------


def _memory(parts: Sequence[Part], chosen: Sequence[tuple[str, ...]], machine: Machine) -> list[int | None]:
    """Return what each part may take of each of its devices: what it must have, and an equal share of what is left.

    Parts that take turns have one share of a device, in which each has room beside what the other keeps in its sleep.
    """
    demands = [part.demand(_placement(devices, None, machine)) for part, devices in zip(parts, chosen, strict=True)]
    chosen = [devices or ((_HOST,) if each.on_host else ()) for devices, each in zip(chosen, demands, strict=True)]
    for part, demand in zip(parts, demands, strict=True):
        _refuse_too_little(part, demand.least_bytes)
    units = [_unit(members, parts, demands) for members in _units(parts)]
    sharing = {
        device: [unit for unit in units if any(device in chosen[index] for index in unit.members)]
        for device in set().union(*chosen)
    }
    spare = {device: _spare(device, users, parts, machine) for device, users in sharing.items()}
    memory = dict[int, int | None]()
    for unit in units:
        for index, asleep in zip(unit.members, unit.others_asleep, strict=True):
            more = [spare[device] for device in chosen[index]] or [_spare_elsewhere(unit, parts, machine)]
            memory[index] = parts[index].wanted.memory or _share(unit.least - asleep, more)
    return [memory[index] for index in range(len(parts))]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Unit:
    """A part, or two that take turns."""

    members: tuple[int, ...]
    others_asleep: tuple[int, ...]  # of each: what the other one keeps in its sleep
    least: int  # bytes that it must have of each of its devices
    is_open: bool  # whether it may have more


def _unit(members: tuple[int, ...], parts: Sequence[Part], demands: Sequence[Demand]) -> _Unit:
    asleep = {index: _asleep(parts[index], demands[index]) for index in members} if len(members) > 1 else {}
    others = tuple(sum(size for other, size in asleep.items() if other != index) for index in members)
    needs = [(parts[i].wanted.memory or demands[i].least_bytes) + size for i, size in zip(members, others, strict=True)]
    is_open = any(parts[index].wanted.memory is None for index in members)
    return _Unit(members=members, others_asleep=others, least=max(needs), is_open=is_open)


def _asleep(part: Part, demand: Demand) -> int:
    if demand.asleep_bytes is None:
        msg = f"{part.name} cannot sleep, but turns of the model are enabled; disable them, or choose another plugin"
        raise PartError(msg, part.model)
    return demand.asleep_bytes


def _share(least: int, spare: Sequence[int | None]) -> int | None:
    known = [each for each in spare if each is not None]
    return least + min(known) if known else None


def _refuse_too_little(part: Part, least: int) -> None:
    given = part.wanted.memory
    if given is not None and given < least:
        msg = f"{part.name}: memory is {gib(given)}; it needs at least {gib(least)} of each device"
        raise ConfigError(msg)


def _spare(device: str, users: Sequence[_Unit], parts: Sequence[Part], machine: Machine) -> int | None:
    """Return how much more than it must have each user gets that leaves its memory open. None: not known."""
    still_open = sum(user.is_open for user in users)
    usable = machine.usable_host_bytes if device == _HOST else machine.usable_bytes
    if usable is None:
        sharing = [parts[index].name for user in users for index in user.members]
        if len(sharing) > 1 and still_open and device != _HOST:
            msg = f"{' and '.join(sharing)} share device {device}, whose memory is not known: set `memory` for each"
            raise ConfigError(msg)
        return None
    needed = sum(user.least for user in users)
    if needed > usable:
        needs = " and ".join(f"{_names(user, parts)} {gib(user.least)}" for user in users)
        if device == _HOST:
            has = (
                f"this machine, or its container, has {gib(machine.host_bytes or 0)} of memory, and {gib(usable)} of it"
            )
        else:
            has = f"device {device} has {gib(usable)}"
        msg = f"{has} to give, and what is to run on it needs at least {gib(needed)}: {needs}"
        raise _TooSmallError(msg)
    return (usable - needed) // max(1, still_open)


def _spare_elsewhere(unit: _Unit, parts: Sequence[Part], machine: Machine) -> int | None:
    """Return the same for what has devices of other machines, each for itself alone."""
    usable = machine.usable_bytes
    if usable is None or not machine.others_alike:
        return None
    if unit.least > usable:
        msg = f"a device elsewhere has {gib(usable)} to give, and {_names(unit, parts)} needs {gib(unit.least)} of each"
        raise _TooSmallError(msg)
    return usable - unit.least


def _names(unit: _Unit, parts: Sequence[Part]) -> str:
    return " by turns with ".join(parts[index].name for index in unit.members)


def _what_would_fit(parts: Sequence[Part], machine: Machine) -> str:
    """Try the same with turns, and with more devices, if there are any."""
    if not machine.devices:
        return "give it more memory, serve fewer models, or make them smaller with the backends' settings"
    return _more_devices(parts, machine) + _or_turns(parts, machine)


def _more_devices(parts: Sequence[Part], machine: Machine) -> str:
    if any(part.wanted.devices is not None for part in parts):
        return "let fewer share a device, or leave out `devices`"
    for number in _MORE_DEVICES:
        if number > len(machine.devices) and _fits(parts, replace(machine, devices=tuple(map(str, range(number))))):
            return f"{number} such devices would do"
    return "no number of such devices would do with these settings"


def _or_turns(parts: Sequence[Part], machine: Machine) -> str:
    """Name the turns if with them all fits on these devices."""
    pairs = Counter(part.index for part in parts)
    taking = [replace(part, by_turns=part.by_turns or pairs[part.index] > 1) for part in parts]
    if taking == list(parts) or not _fits(taking, machine):
        return ""
    return ", or these by turns (`turns: {enabled: true}` of the model)"


def _fits(parts: Sequence[Part], machine: Machine) -> bool:
    try:
        _placed(parts, machine)
    except ConfigError:
        return False
    return True


def gib(size: int) -> str:
    return f"{size / 2**30:.1f} GiB"
