"""The layouts of a number of GPUs that a model allows, those that fit, and the fastest."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from tinsmith import ConfigError
from tinsmith_checkpoints.huggingface import DecoderShape
from tinsmith_megatron.memory import Memory, peak
from tinsmith_megatron.parallel import Layout, Work, check_model, check_ranks
from tinsmith_workbench.layouts.cost import Cost, cost
from tinsmith_workbench.layouts.machine import GB, Machine


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    layout: Layout
    memory: Memory
    cost: Cost
    needed_bytes: float  # with the reserve
    fits: bool


def planned(shape: DecoderShape, gpus: int, work: Work, machine: Machine) -> list[Planned]:
    """Return all layouts: fitting ones first, fastest first; then the others, by their memory."""
    found = [_one(shape, layout, work, machine) for layout in layouts(shape, gpus, machine)]
    if not found:
        msg = f"no layout of {gpus} GPUs divides {shape.class_name} with {shape.num_layers} layers: try another number"
        raise ConfigError(msg)
    return sorted(found, key=_order)


def _one(shape: DecoderShape, layout: Layout, work: Work, machine: Machine) -> Planned:
    memory = peak(shape, layout, work)
    needed = memory.total + machine.reserve_gb * GB
    return Planned(
        layout=layout,
        memory=memory,
        cost=cost(shape, layout, work, machine),
        needed_bytes=needed,
        fits=needed <= machine.memory_gb * GB,
    )


def _order(each: Planned) -> tuple[bool, float, float]:
    return not each.fits, each.cost.step_s if each.fits else each.needed_bytes, each.needed_bytes


def layouts(shape: DecoderShape, gpus: int, machine: Machine) -> Iterator[Layout]:
    """Yield the layouts that the model and the number of GPUs allow. Tensor parallel ranks share a machine."""
    for tp in _divisors(machine.gpus_per_node):
        for pp in _divisors(gpus // tp if gpus % tp == 0 else 0):
            for ep in _divisors(1 if shape.experts is None else shape.experts.num_experts):
                layout = Layout(tp=tp, pp=pp, ep=ep, dp=gpus // (tp * pp), recompute=False)
                if _is_possible(layout, shape):
                    yield layout
                    yield Layout(tp=tp, pp=pp, ep=ep, dp=layout.dp, recompute=True)


def _is_possible(layout: Layout, shape: DecoderShape) -> bool:
    try:
        check_model(layout.config(), shape)
        check_ranks(layout.config(), layout.gpus)
    except ConfigError:
        return False
    return True


def _divisors(number: int) -> Sequence[int]:
    return [n for n in range(1, number + 1) if number % n == 0]
