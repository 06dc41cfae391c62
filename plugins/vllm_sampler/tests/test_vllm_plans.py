"""The memory that plans count for vLLM's cache, against what vLLM asks for."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from vllm_harness import HYBRID, SHAPES, make_sampler, settings

from tinsmith import ConfigError, Placement
from tinsmith.testing import write_tiny_model
from tinsmith_checkpoints.huggingface import Json, known_config
from tinsmith_vllm.config import VllmConfig
from tinsmith_vllm.demand import demand

LONG = 4000  # tokens: vLLM takes no less than a mebibyte
QWEN3_5_4B = known_config("Qwen3.5-4B")


def cached(config: VllmConfig, model: dict[str, Json] | None, placement: Placement) -> tuple[str, int]:
    (found,) = [each for each in demand(config, model, placement).fixed.items() if "values" in each[0]]
    return found


@pytest.mark.slow
@pytest.mark.thorough  # it starts vLLM
@pytest.mark.parametrize("name", ["hybrid", "qwen3"])
def test_vllm_asks_for_what_is_planned_and_not_a_byte_less(name: str, tmp_path: Path) -> None:
    """For one sequence that fills the context, and its token after that."""
    shape = replace(HYBRID if name == "hybrid" else SHAPES[name], max_context_tokens=LONG)
    write_tiny_model(tmp_path / "model", shape)
    model = json.loads((tmp_path / "model" / "config.json").read_text())
    given = {"max_model_len": LONG}
    _, planned = cached(VllmConfig.model_validate(settings(kv_cache_bytes=None, **given)), model, Placement())
    with pytest.raises(ConfigError, match="KV cache"):
        make_sampler(tmp_path / "model", tmp_path / "cache", kv_cache_bytes=planned - 1, **given)
    sampler = make_sampler(tmp_path / "model", tmp_path / "cache", kv_cache_bytes=planned, **given)
    try:
        assert sampler.sampler_capabilities.max_context_tokens == LONG
    finally:
        sampler.close()


@pytest.mark.parametrize(("prefix_caching", "kept"), [(True, 2), (False, 1)])
def test_states_of_a_hybrid_by_hand(prefix_caching: bool, kept: int) -> None:
    """Eight layers attend; of the other 24, three times eight share blocks as large as a state."""
    given = Placement(devices=("0",), memory_bytes=40 << 30, device_bytes=80 << 30)
    config = VllmConfig(prefix_caching=prefix_caching, max_model_len=8192)
    name, found = cached(config, QWEN3_5_4B, given)
    assert name == "keys, values and states"
    token = 2 * 4 * 256 * 2  # in one layer
    state = 32 * 128 * 128 * 4 + 3 * (2 * 16 * 128 + 32 * 128) * 2
    block = 16 * -(-state // (16 * token))
    assert 0 <= block * token - state < 16 * token
    blocks, rest = divmod(found, 8 * block * token)
    assert rest == 0
    tokens = demand(config, QWEN3_5_4B, given).batch_tokens
    assert blocks == tokens // block + 3 * kept + 1
    fixed = demand(config, QWEN3_5_4B, given).fixed
    assert 0 <= (40 << 30) - sum(fixed.values()) < 8 * block * token
    assert fixed["base weights"] == pytest.approx(2 * 4.2e9, rel=0.02), "of its language part"


def test_an_expert_that_computes_every_token_is_counted() -> None:
    """In the weights, and in the activations of a long step."""
    sizes: dict[str, Json] = {
        "architectures": ["Qwen2MoeForCausalLM"], "vocab_size": 1000, "hidden_size": 64, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 4096, "num_experts": 4,
        "num_experts_per_tok": 2, "moe_intermediate_size": 32, "intermediate_size": 48,
    }  # fmt: skip
    given = Placement(devices=("0",), memory_bytes=8 << 30, device_bytes=80 << 30)
    without, with_one = (
        demand(VllmConfig(), {**sizes, "shared_expert_intermediate_size": size}, given).fixed for size in (0, 96)
    )
    assert with_one["base weights"] - without["base weights"] == 2 * 2 * (3 * 64 * 96 + 64)
    steps = "longer steps, of 8192 tokens"
    assert with_one[steps] - without[steps] == 6144 * 3 * 96 * 2
