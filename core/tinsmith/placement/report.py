"""A plan in words and figures."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from tinsmith.figures import MemoryPlan
from tinsmith.placement.machine import Machine
from tinsmith.placement.placing import Placed, gib

_PREFIXES: Final = {"backend": "trainer: ", "sampler": "sampler: "}


def lines_of(plan: Sequence[Placed]) -> Iterator[str]:
    """Yield some lines for each component: its devices, the models and tokens that fit, and the consequences."""
    for placed in plan:
        yield f"{placed.component.name}: {_where(placed)}"
        enough = ", ".join(_enough(placed))
        if enough:
            yield f"  {enough}"
        yield from (f"  {remark}" for remark in placed.demand.remarks)
    yield from _warnings(plan)


def _warnings(plan: Sequence[Placed]) -> Iterator[str]:
    """Yield what to set if the launcher may choose devices that others use."""
    for placed in plan:
        others = [
            each
            for each in plan
            if each.placement.devices and None in (each.component.wanted.memory, placed.component.wanted.memory)
        ]
        if placed.is_elsewhere and others:
            names = " and ".join(each.component.name for each in others)
            yield (
                f"warning: the launcher of {placed.component.name} chooses its devices; if they are of this machine, "
                f"{names} takes memory of the same: set `memory` for all of them"
            )


def _where(placed: Placed) -> str:
    devices, memory = placed.placement.devices, placed.placement.memory_bytes
    if placed.on_host:
        where = "the CPU"
    else:
        where = f"devices {', '.join(devices)}" if devices else "no devices of this machine are assigned"
    share = "of memory" if placed.on_host else "of each" if devices else "for each process"
    each = "" if memory is None else f", {gib(memory)} {share}"
    asleep = placed.demand.asleep_bytes
    if placed.component.by_turns and asleep is not None:
        each += f" in its turn, {gib(asleep)} asleep"
    layout = f" ({placed.demand.layout})" if placed.demand.layout else ""
    return where + each + layout


def _enough(placed: Placed) -> Iterator[str]:
    demand, samples = placed.demand, placed.component.role == "sampler"
    if demand.batch_tokens:
        what = "of keys and values" if samples else "in a micro-batch of one rank"
        yield f"{demand.batch_tokens} tokens {what}"
    if demand.max_models is not None:
        yield f"{demand.max_models} {'snapshots on the device' if samples else 'models in training'}"


def described(plan: Sequence[Placed], machine: Machine, *, tenants: int) -> Iterator[str]:
    """Yield the whole plan, with the memory of each component by purpose."""
    if machine.device_bytes is not None:
        devices = "1 device" if len(machine.devices) == 1 else f"{len(machine.devices)} devices"
        yield f"{devices} of {gib(machine.device_bytes)}, models in training: {tenants}"
    elif machine.host_bytes is not None:
        yield f"no GPU, {gib(machine.host_bytes)} of memory, models in training: {tenants}"
    for placed in plan:
        yield ""
        yield f"{placed.component.name}: {_where(placed)}"
        rows = memory_rows(placed, tenants)
        width = max((len(name) for name, _ in rows), default=0)
        yield from (f"  {name:<{width}} {gib(size):>10}" for name, size in rows)
        yield from (f"  {line}" for line in (*_enough(placed), *placed.demand.remarks))
        if placed.component.role == "backend" and (shortage := _shortage(placed, tenants)):
            yield f"  {shortage}"
    if warnings := list(_warnings(plan)):
        yield from ("", *warnings)


def memory_rows(placed: Placed, tenants: int) -> list[tuple[str, int]]:
    """Return what each device's memory is for, in bytes, with as many models as there are tenants and room."""
    demand, samples = placed.demand, placed.component.role == "sampler"
    number = tenants if demand.max_models is None or samples else min(tenants, demand.max_models)
    own = [(f"{name} of {number} models", size * number) for name, size in demand.per_model.items()]
    rows = [*((name, size) for name, size in demand.fixed.items() if size), *own]
    memory = placed.placement.memory_bytes
    left = [] if memory is None or not rows else [("left", memory - sum(size for _, size in rows))]
    return [*rows, *left]


def memory_of(plan: Sequence[Placed]) -> MemoryPlan | None:
    """Return the planned memory of one model's trainer and sampler together. None if nothing was planned.

    It has the same purposes as `memory_rows`, with as many models as there are places.
    """
    parts, totals, limits = dict[str, int](), list[int](), list[int | None]()
    for placed in plan:
        name, number = _PREFIXES[placed.component.role] if len(plan) > 1 else "", max(1, len(placed.placement.devices))
        demand, memory = placed.demand, placed.placement.memory_bytes
        models = demand.max_models or 1
        own = {f"{part} of {models} models": size * models for part, size in demand.per_model.items()}
        sizes = {f"{name}{part}": size * number for part, size in {**demand.fixed, **own}.items() if size}
        parts |= sizes
        totals.append(sum(sizes.values()))
        limits.append(None if memory is None else memory * number)
    if not parts:
        return None
    known = [each for each in limits if each is not None]
    together = max if plan[0].component.by_turns else sum
    return MemoryPlan(
        parts=tuple(parts.items()),
        total=together(totals),
        limit=together(known) if len(known) == len(limits) else None,
        devices=tuple(sorted({device for placed in plan for device in placed.placement.devices})),
    )


def _shortage(placed: Placed, tenants: int) -> str:
    fitting = placed.demand.max_models
    if fitting is None or fitting >= tenants:
        return ""
    return f"{fitting} of {tenants} models fit; the others wait for a place"
