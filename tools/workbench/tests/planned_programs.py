"""Compile small programs for eight simulated devices, and print as JSON what they do and what was planned.

A process of its own, because the number of devices is set before JAX starts. `planned_programs.py DIRECTORY NAME...`
"""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax

from tinsmith_checkpoints.huggingface.tiny_model import TinyShape, write_tiny_model
from tinsmith_checkpoints.values import Json
from tinsmith_jax.config import MeshConfig
from tinsmith_jax.families import read_config
from tinsmith_jax.weights import load_base
from tinsmith_workbench.compile_check.case import Case, base_shapes, make_case
from tinsmith_workbench.compile_check.figures import analysed
from tinsmith_workbench.compile_check.hlo import read_module
from tinsmith_workbench.compile_check.options import Options

SHAPE = TinyShape(
    vocab_size=512, hidden_size=128, intermediate_size=256, num_layers=3, num_heads=4, num_kv_heads=2, head_dim=32
)
MESHES = {
    "all axes": MeshConfig(data=2, fsdp=2, tensor=2),
    "fsdp": MeshConfig(fsdp=2),
    "tensor": MeshConfig(tensor=2),
    "one device": MeshConfig(),
}


def main(directory: Path, names: Sequence[str]) -> None:
    jax.config.update("jax_num_cpu_devices", 8)
    write_tiny_model(directory, SHAPE)
    figures = {name: _figures(_case(directory, name), name.split(", ")[1]) for name in names}
    print(json.dumps({"figures": figures, "base": _base(directory)}))


def _case(directory: Path, name: str) -> Case:
    """As on a TPU, but in float32 and without kernels that only a TPU can run."""
    options = Options(
        topology="v6e:2x4",
        model=str(directory),
        mesh=MESHES[name.split(", ")[0]],
        tenants=2,
        rank=8,
        context=128,
        tokens=256,
        slots=3,
        recompute="kept" not in name,
        gather_once="once" in name,
        dtype="float32",
        kernels="reference",
    )
    return make_case(options, read_config(directory), jax.devices())


def _figures(case: Case, kind: str) -> dict[str, Json]:
    program: Any = case.program(kind).compile()  # of jax.stages.Compiled
    cost = case.cost(kind)
    memory, text = program.memory_analysis(), program.as_text()
    results = memory.output_size_in_bytes - memory.alias_size_in_bytes
    pointers = 8 * len(read_module(text).results)
    made = analysed(text, 0, case.layout.devices.shape, cost.trips())
    return {
        "found": sorted([each.kind, each.axis, each.count] for each in made.collectives),
        "planned": sorted([*key, count] for key, count in cost.collectives().items()),
        "bytes": {f"{each.kind} {each.axis}": each.num_bytes for each in made.collectives},
        "flops": made.flops,
        "formula": sum(cost.flops().values()),
        "arguments": [made.argument_bytes, memory.argument_size_in_bytes],
        "results": [made.result_bytes, results - pointers],
        "state": case.held_arguments(kind),
        "cache_writes": _cache_writes(text, case),
    }


def _cache_writes(text: str, case: Case) -> list[list[int]]:
    """Return the shapes of what is written to the cache."""
    places = [part.sharding.shard_shape(part.shape) for part in case.cache]
    return [
        list(run.operand(1).arrays[0].dims)
        for run in read_module(text).runs()
        if run.instruction.opcode == "dynamic-update-slice" and run.instruction.arrays[0].dims in places
    ]


def _base(directory: Path) -> list[list[str]]:
    """Describe the weights that a backend loads, and those that are compiled for."""
    case = _case(directory, "all axes, base")
    loaded = load_base(directory, case.config, "float32", lambda *_: None, case.layout)
    return [
        [
            f"{jax.tree_util.keystr(path)} {x.shape} {x.dtype} {x.sharding}"
            for path, x in jax.tree.leaves_with_path(tree)
        ]
        for tree in (loaded, base_shapes(case.config, "float32", case.layout))
    ]


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
