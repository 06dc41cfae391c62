"""Models with the gated delta rule against transformers: their adapters in every layout that they allow."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron_harness import VOCAB, fork_backend
from test_megatron_layouts import DP2, EP2, FAST, PP2, RECOMPUTED, TP2, compare
from transformers.models.qwen3_5 import modeling_qwen3_5
from transformers.models.qwen3_5_moe import modeling_qwen3_5_moe
from transformers.models.qwen3_next import modeling_qwen3_next

from tinsmith import ConfigError
from tinsmith.testing import ModelDriver
from tinsmith_checkpoints.huggingface import tiny_causal_lm
from tinsmith_megatron.architecture import read_architecture
from tinsmith_megatron.config import MegatronConfig
from tinsmith_megatron.parallel import check_model

pytestmark = pytest.mark.slow  # starting ranks takes seconds

SIZES = {"vocab_size": VOCAB, "num_hidden_layers": 4, "hidden_size": 32, "head_dim": 16, "tie_word_embeddings": False}
EP = {"expert_parallel": 2}
DENSE, EXPERTS, NEXT = "Qwen3_5ForCausalLM", "Qwen3_5MoeForCausalLM", "Qwen3NextForCausalLM"


@pytest.fixture(scope="module")
def hybrids(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("megatron-hybrids")
    for name in (DENSE, EXPERTS, NEXT):
        tiny_causal_lm(name, SIZES).save_pretrained(root / name)
    return root


def token_by_token(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, g: torch.Tensor, beta: torch.Tensor, **_: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """Apply the rule as it is written down, in float64: by transformers' code, float32's own errors pass 1e-5."""
    q, k, v, g, beta = (x.double() for x in (query, key, value, g, beta))
    q, k = (x / torch.sqrt((x * x).sum(-1, keepdim=True) + 1e-6) for x in (q, k))
    state, found = torch.zeros(*k.shape[:1], *k.shape[2:], v.shape[-1], dtype=v.dtype), []
    for t in range(k.shape[1]):
        state = state * g[:, t, :, None, None].exp()
        correction = beta[:, t, :, None] * (v[:, t] - (k[:, t, :, :, None] * state).sum(-2))
        state = state + k[:, t, :, :, None] * correction[:, :, None]
        found.append((q[:, t, :, :, None] * state).sum(-2) * k.shape[-1] ** -0.5)
    return torch.stack(found, dim=1).to(value.dtype), state.to(value.dtype)


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        pytest.param(
            DENSE, {**PP2, **FAST, **RECOMPUTED}, marks=pytest.mark.thorough, id="stages, fast, recomputed"
        ),
        pytest.param(EXPERTS, {**TP2, **EP, **FAST, **RECOMPUTED}, id="heads and experts, fast, recomputed"),
        *(
            pytest.param(DENSE, layout, marks=pytest.mark.thorough, id=name)
            for name, layout in {
                "one": {}, "heads": TP2, "heads, fast": {**TP2, **FAST}, "stages": PP2, "data": DP2,
                "data, fast": {**DP2, **FAST},
            }.items()
        ),
        *(
            pytest.param(EXPERTS, layout, marks=pytest.mark.thorough, id=f"experts: {name}")
            for name, layout in {
                "one": {}, "divided": EP2, "divided, fast, recomputed": {**EP2, **FAST, **RECOMPUTED},
                "stages, fast": {**PP2, **FAST}, "data": DP2,
            }.items()
        ),
        pytest.param(NEXT, EP2, marks=pytest.mark.thorough, id="joined: divided"),
        pytest.param(NEXT, {**TP2, **FAST}, marks=pytest.mark.thorough, id="joined: heads, fast"),
    ],
)  # fmt: skip
def test_numbers_are_those_of_transformers(
    name: str, settings: dict[str, Any], hybrids: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for modeling in (modeling_qwen3_5, modeling_qwen3_5_moe, modeling_qwen3_next):
        monkeypatch.setattr(modeling, "torch_chunk_gated_delta_rule", token_by_token)
    backend = fork_backend(hybrids / name, tmp_path, max_batch_tokens=128, **settings)
    driver = ModelDriver(backend)
    try:
        compare(driver, hybrids / name)
    finally:
        backend.close()


def test_heads_of_both_kinds_of_layers_are_divided(hybrids: Path) -> None:
    """The tiny ones have two heads of keys with the rule, and two where they attend; of values, four."""
    shape = read_architecture(hybrids / DENSE).shape
    check_model(MegatronConfig(tensor_parallel=2), shape)
    with pytest.raises(ConfigError, match=r"linear_num_key_heads of the model \(2\) .* possible are 1, 2$"):
        check_model(MegatronConfig(tensor_parallel=4), replace(shape, num_kv_heads=4))
