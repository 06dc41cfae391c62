"""The memory that is counted without jax, against real arrays and real programs for CPUs."""

from typing import Any

import jax
import pytest
from cost_programs import Programs
from jax_harness import add_model, local, make_op, train

from tinsmith import AdamParams, LoraConfig
from tinsmith_jax.backend import JaxBackend
from tinsmith_jax.costs import Computing, Costs

USUAL = {"tokens": 1024, "context": 512, "rank": 16, "slots": 4, "recompute": False}
OTHERS: dict[str, dict[str, Any]] = {
    "long": {"tokens": 4096},
    "wide": {"hidden_size": 512, "intermediate_size": 1536},
    "deep": {"num_hidden_layers": 12, "rank": 32},
    "many heads": {"num_attention_heads": 16, "num_key_value_heads": 8},
    "many words": {"vocab_size": 32_768, "hidden_size": 128, "num_hidden_layers": 2},
    "recomputed": {"recompute": True, "tokens": 4096},
    "another": {
        "hidden_size": 384, "intermediate_size": 1024, "num_hidden_layers": 6, "num_attention_heads": 6,
        "num_key_value_heads": 2, "head_dim": 64, "vocab_size": 8000, "rank": 32,
    },
}  # fmt: skip


EXPERTS: dict[str, Any] = {"num_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": 128}
DELTA: dict[str, Any] = {
    "num_hidden_layers": 8, "linear_num_key_heads": 4, "linear_num_value_heads": 8, "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
}  # fmt: skip
MAMBA: dict[str, Any] = {
    "architectures": ["NemotronHForCausalLM"], "n_routed_experts": 0, "mamba_num_heads": 8, "mamba_head_dim": 32,
    "n_groups": 4, "ssm_state_size": 32,
}  # fmt: skip
LATENTS: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"], "num_key_value_heads": 8, "q_lora_rank": 96, "kv_lora_rank": 64,
    "qk_nope_head_dim": 32, "qk_rope_head_dim": 16, "v_head_dim": 24, "n_routed_experts": 16, "num_experts_per_tok": 4,
    "moe_intermediate_size": 128, "n_group": 4, "topk_group": 2,
}  # fmt: skip
KINDS: dict[str, dict[str, Any]] = {
    "experts": {"architectures": ["Qwen3MoeForCausalLM"], **EXPERTS},
    "experts, long": {"architectures": ["Qwen3MoeForCausalLM"], **EXPERTS, "tokens": 2048},
    "experts and windows": {
        "architectures": ["GptOssForCausalLM"], "num_local_experts": 16, "num_experts_per_tok": 4,
        "intermediate_size": 128, "sliding_window": 128,
    },
    "delta rule": {"architectures": ["Qwen3_5ForCausalLM"], **DELTA},
    "delta rule, long": {"architectures": ["Qwen3_5ForCausalLM"], **DELTA, "tokens": 2048},
    "Mamba-2": {**MAMBA, "hybrid_override_pattern": "M-*-M-*-"},
    "Mamba-2, long": {**MAMBA, "hybrid_override_pattern": "M-*-M-*-", "tokens": 2048},
    "Mamba-2 and experts": {
        **MAMBA, "hybrid_override_pattern": "ME*EME*E", "n_routed_experts": 16, "num_experts_per_tok": 4,
        "moe_intermediate_size": 128, "n_group": 4, "topk_group": 2,
    },
    "latents": {**LATENTS, "first_k_dense_replace": 4},
    "latents and experts": {**LATENTS, "num_hidden_layers": 5, "first_k_dense_replace": 1},
}  # fmt: skip


@pytest.mark.parametrize(
    "sizes",
    [
        pytest.param({}, id="usual"),
        *(pytest.param(each, id=name, marks=pytest.mark.thorough) for name, each in (*OTHERS.items(), *KINDS.items())),
    ],
)
def test_a_program_for_cpus_takes_what_is_counted(sizes: dict[str, Any], quick_compilation: None) -> None:
    """A pass within a tenth. Sampling takes little besides pages and weights: within a twentieth of all that.

    What is counted for sampling is for whichever program takes more.
    """
    programs = Programs(**{**USUAL, **sizes})
    found, counted, _ = programs.gradients()
    assert counted == pytest.approx(found, rel=0.1)
    found, counted, held = max(programs.sampling(kind) for kind in ("decode", "prefill"))
    assert counted == pytest.approx(found, abs=0.05 * (held + found))
    assert counted > found / 2


@pytest.mark.parametrize(
    "kind", ["experts", *(pytest.param(name, marks=pytest.mark.thorough) for name in KINDS if name != "experts")]
)
def test_a_pass_of_each_kind_of_layer_takes_what_is_counted(kind: str, quick_compilation: None) -> None:
    found, counted, _ = Programs(**{**USUAL, **KINDS[kind]}).gradients()
    assert counted == pytest.approx(found, rel=0.1)


def test_arrays_of_a_backend_take_what_is_counted(contract_backend: JaxBackend) -> None:
    backend, devices = contract_backend, local(contract_backend)
    limits, model = backend.limits, backend.model_config
    costs = Costs(
        shape=model,
        computing=Computing(on_cpu=True, dtype=limits.dtype, recompute=limits.recompute),
        max_lora_rank=limits.max_lora_rank,
    )
    base = {id(leaf): leaf.nbytes for leaf in jax.tree.leaves(devices.training.base)}
    assert costs.base == sum(base.values())  # the head of a tied model is its embedding
    add_model(backend, "m", LoraConfig(rank=3, seed=1))
    try:
        train(backend, make_op("m", 1, [9]), AdamParams())
        backend.forward_backward([make_op("m", 1, [9])])
        held = devices.training.held("m").adapters
        assert costs.model(3) == sum(leaf.nbytes for leaf in jax.tree.leaves(dict(held)))
    finally:
        backend.unload_model("m")
    assert devices.sampling is not None
    slots, context = devices.sampling.shape.slots_per_shard, limits.max_context_tokens
    counted = {
        name: part for name, part in devices.sampling.resident.items() if name not in ("rank", "scale")
    }  # a few bytes
    arrays = jax.tree.leaves((devices.sampling.cache, counted))
    assert costs.rows(slots) + costs.pages(slots, context) == sum(leaf.nbytes for leaf in arrays)
