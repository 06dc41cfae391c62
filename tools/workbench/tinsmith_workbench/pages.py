"""The generated parts of docs/reference that the workbench computes, or renders from recorded figures."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Final

from tinsmith_megatron.parallel import Work
from tinsmith_workbench.compile_check import tables as compile_tables
from tinsmith_workbench.layouts import tables as layout_tables
from tinsmith_workbench.layouts.command import read_shape
from tinsmith_workbench.layouts.machine import Machine
from tinsmith_workbench.rehearsal import rows

_REHEARSED: Final = ("Qwen3-8B", "Qwen3-32B", "Llama-3-70B", "Qwen3-32B-W8A16", "Llama-3-70B-W8A16")
_PLANNED: Final = ("Qwen3-30B-A3B", "Qwen3-235B-A22B")
_TPU: Final = ("tenants", "slices", "recompute", "scaling", "sampling")
_KINDS: Final = (("lora", 32), ("full", 0))  # of training, by LoRA rank


def generators(reference: Path) -> dict[str, Callable[[], str]]:
    """Return the writer of each part, by name. The directory has the recorded figures."""
    planned = {
        f"megatron-{model.split('-')[1].lower()}-{kind}": partial(_layouts, model, rank)
        for model in _PLANNED
        for kind, rank in _KINDS
    }
    memory = reference / "fsdp-memory.jsonl"
    rehearsed = {f"fsdp-memory-{model}": partial(_rehearsals, memory, model) for model in _REHEARSED}
    replicas = partial(_rehearsals, memory, "Qwen3-8B", replicas=True)
    compiled = {f"tpu-{kind}": partial(_compiled, reference / "tpu.jsonl", kind) for kind in _TPU}
    return {**planned, **rehearsed, "fsdp-memory-replicas": replicas, **compiled}


def _layouts(model: str, rank: int) -> str:
    """Return the fastest layouts of 8 to 256 GPUs; docs/reference/megatron-plan.md says for what work."""
    gpus = [8 << power for power in range(6)]
    return layout_tables.table(read_shape(model), gpus, Work(rank=rank), Machine())


def _rehearsals(file: Path, model: str, *, replicas: bool = False) -> str:
    """Return what rehearsals found; docs/reference/fsdp-memory.md says how they were made."""
    return rows.table(rows.read_lines(file.read_text(encoding="utf-8")), model, replicas=replicas)


def _compiled(file: Path, kind: str) -> str:
    """Return what compile-check found; docs/reference/tpu.md says how it was asked."""
    rows = compile_tables.read_lines(file.read_text(encoding="utf-8"))
    by_itself = [row for row in rows if row.options.tenants == 1]
    alone = [row for row in by_itself if row.options.recompute]
    kept = {(row.options.model, row.options.topology) for row in rows if not row.options.recompute}
    match kind:
        case "tenants":
            return compile_tables.passes(row for row in rows if row.options.tenants > 1)
        case "slices":
            return compile_tables.slices(alone)
        case "recompute":
            return compile_tables.passes(row for row in by_itself if (row.options.model, row.options.topology) in kept)
        case "scaling":
            return compile_tables.scaling(row for row in alone if row.slice.chip.name == "v6e")
        case _:
            return compile_tables.sampling(alone)
