"""The fastest layout of each number of GPUs, as a Markdown table."""

from collections.abc import Iterable

from tinsmith_checkpoints.huggingface import DecoderShape
from tinsmith_megatron.parallel import Work
from tinsmith_workbench.layouts.choosing import Planned, planned
from tinsmith_workbench.layouts.machine import GB, Machine

_HEADINGS = (
    "GPUs", "TP", "PP", "EP", "DP", "Recompute", "GB: weights", "adapters", "moments", "gradients", "activations",
    "buffers", "with reserve", "GB received: tensor", "expert", "pipeline", "data", "s a step", "of these idle",
    "tokens/s",
)  # fmt: skip


def table(shape: DecoderShape, numbers_of_gpus: Iterable[int], work: Work, machine: Machine) -> str:
    """Return a row for each number of GPUs."""
    lines = [_line(_HEADINGS), _line(["--:"] * len(_HEADINGS))]
    return "\n".join([*lines, *(_row(planned(shape, gpus, work, machine)[0]) for gpus in numbers_of_gpus)])


def _row(best: Planned) -> str:
    layout, memory, cost = best.layout, best.memory, best.cost
    how = [*map(str, (layout.gpus, layout.tp, layout.pp, layout.ep, layout.dp)), "yes" if layout.recompute else "no"]
    if not best.fits:
        return _line([*how, *[""] * 6, f"**{_gb(best.needed_bytes)}**", *[""] * 4, "does not fit", "", ""])
    parts = (memory.weights, memory.adapters, memory.moments, memory.gradients, memory.activations, memory.buffers)
    sent = (cost.traffic.tensor, cost.traffic.expert, cost.traffic.pipeline, cost.traffic.data)
    return _line(
        [
            *how,
            *map(_gb, (*parts, best.needed_bytes, *sent)),
            f"{cost.step_s:.1f}",
            f"{cost.idle_s:.1f}",
            f"{cost.tokens_per_s:,.0f}",
        ]
    )


def _gb(size: float) -> str:
    return f"{size / GB:.1f}"


def _line(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"
