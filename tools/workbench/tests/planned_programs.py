"""Compile small programs for eight simulated devices, and print as JSON what they do and what was planned.

A process of its own, because the number of devices is set before JAX starts. `planned_programs.py DIRECTORY NAME...`
"""

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

from tinsmith_checkpoints.huggingface.tiny_model import TinyShape, write_tiny_model
from tinsmith_checkpoints.values import Json
from tinsmith_jax.admission import computing_of
from tinsmith_jax.config import JaxConfig, MeshConfig
from tinsmith_jax.costs import Costs
from tinsmith_jax.families import config_of, read_config
from tinsmith_jax.weights import base_shapes, load_base
from tinsmith_workbench.compile_check.case import Case, make_case
from tinsmith_workbench.compile_check.figures import analysed
from tinsmith_workbench.compile_check.hlo import read_module
from tinsmith_workbench.compile_check.options import Options

SHAPE = TinyShape(
    vocab_size=512, hidden_size=128, intermediate_size=256, num_layers=3, num_heads=4, num_kv_heads=2, head_dim=32
)
_SIZES: Mapping[str, Json] = {
    "vocab_size": 512, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 4, "head_dim": 32,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 2048, "rope_theta": 1e6,
    "tie_word_embeddings": False,
}  # fmt: skip
_DELTA: Mapping[str, Json] = {
    "num_hidden_layers": 8,  # of four, XLA would see one loop's round, and move its collectives
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 32, "linear_value_head_dim": 32,
}  # fmt: skip
_MAMBA: Mapping[str, Json] = {
    "architectures": ["NemotronHForCausalLM"], "n_routed_experts": 0,
    "mamba_num_heads": 4, "mamba_head_dim": 32, "n_groups": 2, "ssm_state_size": 16,
}  # fmt: skip
_EXPERTS: Mapping[str, Json] = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
KINDS: Mapping[str, Mapping[str, Json]] = {
    "experts": {"architectures": ["Qwen3MoeForCausalLM"], **_EXPERTS},
    "shared expert": {
        "architectures": ["Qwen2MoeForCausalLM"], **_EXPERTS, "shared_expert_intermediate_size": 128,
    },
    "delta rule": {"architectures": ["Qwen3_5ForCausalLM"], **_DELTA},
    "delta rule and experts": {
        "architectures": ["Qwen3NextForCausalLM"], **_DELTA, **_EXPERTS, "shared_expert_intermediate_size": 64,
    },
    "latents": {
        "architectures": ["DeepseekV3ForCausalLM"], "num_key_value_heads": 4, "q_lora_rank": 48, "kv_lora_rank": 40,
        "qk_nope_head_dim": 32, "qk_rope_head_dim": 16, "v_head_dim": 24, "n_routed_experts": 8,
        "num_experts_per_tok": 2, "moe_intermediate_size": 64, "n_group": 4, "topk_group": 2,
        "first_k_dense_replace": 1,
    },
    "Mamba-2": {**_MAMBA, "hybrid_override_pattern": "M-*-M-*-"},
    "Mamba-2 and experts": {
        **_MAMBA, "hybrid_override_pattern": "ME*EME*E", "n_routed_experts": 8, "num_experts_per_tok": 2,
        "moe_intermediate_size": 64, "moe_shared_expert_intermediate_size": 96, "moe_latent_size": 48,
        "n_group": 4, "topk_group": 2,
    },
    "no gates": {**_MAMBA, "hybrid_override_pattern": "*-*-*-*-"},
    "side by side": {
        "architectures": ["Cohere2ForCausalLM"], "sliding_window": 128, "tie_word_embeddings": True,
        "num_hidden_layers": 4,
    },
    "windows and sinks": {
        "architectures": ["GptOssForCausalLM"], "num_local_experts": 8, "num_experts_per_tok": 2,
        "intermediate_size": 64, "sliding_window": 128,
    },
    "windows and caps": {
        "architectures": ["Gemma2ForCausalLM"], "sliding_window": 128, "attn_logit_softcapping": 50.0,
        "query_pre_attn_scalar": 32, "hidden_activation": "gelu_pytorch_tanh",
    },
}  # fmt: skip
"""The kinds of layers, by what makes them unlike those of Llama."""

MESHES = {
    "all axes": MeshConfig(data=2, fsdp=2, tensor=2),
    "streams": MeshConfig(data=2, fsdp=2),
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
    kind, _, mesh = name.split(", ")[0].rpartition(" on ")
    options = Options(
        topology="v6e:2x4",
        model=kind or str(directory),
        mesh=MESHES[mesh],
        tenants=2,
        rank=8,
        context=256 if kind else 128,  # more than the windows
        tokens=256,
        slots=3,
        recompute="kept" not in name,
        gather_once="once" in name,
        dtype="float32",
        kernels="reference",
    )
    config = config_of({**_SIZES, **KINDS[kind]}, Path("config.json")) if kind else read_config(directory)
    return make_case(options, config, jax.devices())


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
        "held": _held(case),
        "cache_writes": _cache_writes(text, case),
    }


def _held(case: Case) -> dict[str, tuple[int, int]]:
    """Return what lies on a device between calls: counted without jax, and by the shapes that are compiled for."""
    settings = JaxConfig(
        dtype="float32",
        mesh=MeshConfig(data=case.layout.axes.data, fsdp=case.layout.axes.fsdp, tensor=case.layout.axes.tensor),
    )
    costs = Costs(shape=case.config, computing=computing_of(settings, on_cpu=False), max_lora_rank=8)
    slots, context = case.shape.slots_per_shard, case.limits.max_context_tokens
    return {
        "base": (costs.base, case.base_bytes()),
        "tenant": (costs.model(8), case.tenant_bytes()),
        "zeros": (costs.zeros, case.zeros_bytes()),
        "sampling": (costs.rows(slots) + costs.pages(slots, context), case.sampling_bytes()),
    }


def _cache_writes(text: str, case: Case) -> list[list[int]]:
    """Return the shapes of what is written to the cache."""
    places = [part.sharding.shard_shape(part.shape) for part in case.cache.pages]
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
