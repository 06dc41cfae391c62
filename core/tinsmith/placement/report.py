"""A plan in words and figures."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from tinsmith.placement.placing import Placed, gib


def lines_of(plan: Sequence[Placed]) -> Iterator[str]:
    """Yield a line or two for each part: where it runs, and what that is enough for."""
    for placed in plan:
        yield f"{placed.part.name}: {_where(placed)}"
        enough = ", ".join(_enough(placed))
        if enough:
            yield f"  {enough}"


def _where(placed: Placed) -> str:
    devices, memory = placed.placement.devices, placed.placement.memory_bytes
    where = f"devices {', '.join(devices)}" if devices else "no devices of this machine are assigned"
    each = "" if memory is None else f", {gib(memory)} of each" if devices else f", {gib(memory)} for each process"
    layout = f" ({placed.demand.layout})" if placed.demand.layout else ""
    return where + each + layout


def _enough(placed: Placed) -> Iterator[str]:
    demand, samples = placed.demand, placed.part.role == "sampler"
    if demand.batch_tokens:
        what = "of keys and values" if samples else "in a micro-batch of one rank"
        yield f"{demand.batch_tokens} tokens {what}"
    if demand.max_models is not None:
        yield f"{demand.max_models} {'snapshots on the device' if samples else 'models in training'}"


def memory_rows(placed: Placed, num_models: int) -> list[tuple[str, int]]:
    """Return what each device's memory is for, in bytes, with so many models."""
    demand = placed.demand
    own = [(f"{name} of {num_models} models", size * num_models) for name, size in demand.per_model.items()]
    return [*demand.fixed.items(), *own]
