"""Assigns devices and memory. A pure function of the parts and the machine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

from tinsmith.backend import Demand, Placement
from tinsmith.errors import ConfigError
from tinsmith.placement.machine import Machine
from tinsmith.placement.parts import Part

_MORE_DEVICES: Final = (1, 2, 4, 8, 16, 32, 64)


@dataclass(frozen=True, slots=True, kw_only=True)
class Placed:
    """A part, what it gets, and what it makes of that."""

    part: Part
    placement: Placement
    demand: Demand


class _TooSmallError(ConfigError):
    """A device does not have what its users need."""


def place(parts: Sequence[Part], machine: Machine) -> list[Placed]:
    """Give each part devices of its own if there are enough, else let parts share them; then divide the memory.

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


# Devices --------------------------------------------------------------------------------------------------------------


def _devices(parts: Sequence[Part], machine: Machine) -> list[tuple[str, ...]]:
    """Return the devices of each part: those that it names, else some that nobody has named, else shared ones."""
    numbers = [_number(part, machine) for part in parts]
    named = {device for part in parts for device in _named(part)}
    free = [device for device in machine.devices if device not in named]
    open_parts = [index for index, part in enumerate(parts) if not _named(part) and numbers[index] != 0]
    given = _spread([numbers[index] for index in open_parts], free) or _shared(
        [numbers[index] for index in open_parts], machine.devices
    )
    chosen = dict(zip(open_parts, given, strict=True))
    return [chosen.get(index, _named(part)) for index, part in enumerate(parts)]


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
    """Return what each part may take of each of its devices: what it must have, and an equal share of what is left."""
    least = [
        part.demand(_placement(devices, None, machine)).least_bytes for part, devices in zip(parts, chosen, strict=True)
    ]
    for part, size in zip(parts, least, strict=True):
        _refuse_too_little(part, size)
    sharing = {device: [i for i, own in enumerate(chosen) if device in own] for device in set().union(*chosen)}
    spare = {device: _spare(device, users, parts, least, machine) for device, users in sharing.items()}
    alone = machine.usable_bytes if machine.others_alike else None
    return [
        part.wanted.memory or _share(least[index], [spare[device] for device in chosen[index]] or [alone])
        for index, part in enumerate(parts)
    ]


def _share(least: int, spare: Sequence[int | None]) -> int | None:
    known = [each for each in spare if each is not None]
    return least + min(known) if known else None


def _refuse_too_little(part: Part, least: int) -> None:
    given = part.wanted.memory
    if given is not None and given < least:
        msg = f"{part.name}: memory is {gib(given)}; it needs at least {gib(least)} of each device"
        raise ConfigError(msg)


def _spare(
    device: str, users: Sequence[int], parts: Sequence[Part], least: Sequence[int], machine: Machine
) -> int | None:
    """Return how much more than it must have each part gets that leaves its memory open. None: not known."""
    fixed = [parts[user].wanted.memory or least[user] for user in users]
    still_open = sum(parts[user].wanted.memory is None for user in users)
    usable = machine.usable_bytes
    if usable is None:
        if len(users) > 1 and still_open:
            names = " and ".join(parts[user].name for user in users)
            msg = f"{names} share device {device}, whose memory is not known: set `memory` for each"
            raise ConfigError(msg)
        return None
    if sum(fixed) > usable:
        needs = " and ".join(f"{parts[user].name} {gib(size)}" for user, size in zip(users, fixed, strict=True))
        msg = (
            f"device {device} has {gib(usable)} to give, and what is to run on it needs at least {gib(sum(fixed))}: "
            f"{needs}"
        )
        raise _TooSmallError(msg)
    return (usable - sum(fixed)) // max(1, still_open)


def _what_would_fit(parts: Sequence[Part], machine: Machine) -> str:
    """Try the same with more devices."""
    if any(part.wanted.devices is not None for part in parts):
        return "let fewer share a device, or leave out `devices`"
    for number in _MORE_DEVICES:
        if number > len(machine.devices):
            try:
                _placed(parts, replace(machine, devices=tuple(map(str, range(number)))))
            except ConfigError:
                continue
            return f"{number} such devices would do"
    return "no number of such devices would do with these settings"


def gib(size: int) -> str:
    return f"{size / 2**30:.1f} GiB"
