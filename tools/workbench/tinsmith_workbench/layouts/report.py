"""Layouts as text for people, and the chosen one as configuration."""

from collections.abc import Sequence

from tinsmith_megatron.parallel import Layout, Work
from tinsmith_workbench.layouts.choosing import Planned
from tinsmith_workbench.layouts.machine import GB, Machine


def report(found: Sequence[Planned], name: str, work: Work, machine: Machine, *, top: int) -> str:
    """Describe the best layouts, the memory and traffic of the first, and its configuration."""
    fitting = [each for each in found if each.fits]
    best = found[0]
    lines = [
        _asked(name, work, best.layout.gpus),
        f"{len(fitting)} of {len(found)} layouts fit into {machine.memory_gb:.1f} GB; the fastest:",
        "",
        *_columns([_HEADINGS, *(_row(each) for each in fitting[:top])]),
        "",
        _memory(best, machine),
        _traffic(best),
        _time(best),
        "",
        configuration(best.layout, name, work, machine),
    ]
    return "\n".join(lines)


def nothing_fits(found: Sequence[Planned], machine: Machine) -> str:
    best = found[0]
    return (
        f"none of {len(found)} layouts of {best.layout.gpus} GPUs fits into {machine.memory_gb:.1f} GB: the "
        f"smallest, {layout_text(best.layout)}, needs {best.needed_bytes / GB:.1f} GB; use more GPUs, or lower "
        "--tokens, --tenants or --rank"
    )


def _asked(name: str, work: Work, gpus: int) -> str:
    what = "all weights of one model" if work.full else f"{work.tenants} adapters of rank {work.rank}"
    return (
        f"{name} on {gpus} GPUs: {what}; micro-batches of {work.tokens:,} tokens, sequences of up to {work.context:,}, "
        f"{work.step_tokens:,} tokens a step"
    )


_HEADINGS = ("TP", "PP", "EP", "DP", "recompute", "GB", "s a step", "tokens/s")


def _row(each: Planned) -> tuple[str, ...]:
    layout = each.layout
    sizes = (layout.tp, layout.pp, layout.ep, layout.dp)
    return (
        *map(str, sizes),
        "yes" if layout.recompute else "no",
        f"{each.needed_bytes / GB:.1f}",
        f"{each.cost.step_s:.2f}",
        f"{each.cost.tokens_per_s:,.0f}",
    )


def _columns(rows: Sequence[tuple[str, ...]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]


def layout_text(layout: Layout) -> str:
    recomputed = ", recomputed" if layout.recompute else ""
    return f"TP {layout.tp}, PP {layout.pp}, EP {layout.ep}, DP {layout.dp}{recomputed}"


def _memory(each: Planned, machine: Machine) -> str:
    memory = each.memory
    parts = {
        "weights": memory.weights,
        "adapters": memory.adapters,
        "moments": memory.moments,
        "gradients": memory.gradients,
        "activations": memory.activations,
        "buffers": memory.buffers,
        "reserve": machine.reserve_gb * GB,
    }
    text = ", ".join(f"{name} {size / GB:.2f}" for name, size in parts.items())
    return f"GB a GPU of {layout_text(each.layout)}: {text}"


def _traffic(each: Planned) -> str:
    sent = each.cost.traffic
    groups = {"tensor": sent.tensor, "expert": sent.expert, "pipeline": sent.pipeline, "data": sent.data}
    text = ", ".join(f"{name} {size / GB:.2f}" for name, size in groups.items())
    return f"GB that a GPU receives in a step, by group: {text}"


def _time(each: Planned) -> str:
    cost = each.cost
    return (
        f"seconds of a step: {cost.compute_s:.2f} compute, {cost.links_s:.2f} links, {cost.idle_s:.2f} idle stages; "
        "arithmetic from the rates given, not measured"
    )


def configuration(layout: Layout, name: str, work: Work, machine: Machine) -> str:
    """Return the `models:` section as YAML."""
    nodes = -(-layout.gpus // machine.gpus_per_node)
    settings: dict[str, object] = {
        "plugin": "megatron",
        "nnodes": nodes,
        "nproc_per_node": layout.gpus // nodes,
        "tensor_parallel": layout.tp,
        "pipeline_parallel": layout.pp,
        "expert_parallel": layout.ep,
        "activation_checkpointing": str(layout.recompute).lower(),
        "max_batch_tokens": work.tokens,
        "max_context_tokens": work.context,
        "max_models": 1 if work.full else work.tenants,
        "max_full_models": 1 if work.full else 0,
        "max_lora_rank": work.rank,
    }
    if nodes > 1:
        settings |= {"launcher": "scheduler", "control_address": "ENGINE_HOST:29400 # of the engine's machine"}
    lines = ["models:", f"  - name: {name}", f"    path: /models/{name.rpartition('/')[2]}", "    backend:"]
    return "\n".join([*lines, *(f"      {key}: {value}" for key, value in settings.items())])
