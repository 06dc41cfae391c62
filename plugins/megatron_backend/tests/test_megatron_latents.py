"""Models that attend by latents against transformers: their adapters in every layout, and packed sequences."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from megatron_harness import VOCAB, fork_backend
from safetensors.torch import load_file, save_file
from test_megatron_layouts import DP2, EP2, FAST, PP2, RECOMPUTED, THREE_KINDS, TP2, compare

from tinsmith import Array, Datum, LoraConfig, ReplayedExperts
from tinsmith.testing import ModelDriver, assert_same_arrays, logprobs_of, ragged_data
from tinsmith_checkpoints.huggingface import tiny_causal_lm

pytestmark = pytest.mark.slow  # starting ranks takes seconds

SIZES = {"vocab_size": VOCAB, "hidden_size": 32, "tie_word_embeddings": False, "initializer_range": 0.08}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10_000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
    "mscale": 1.0,
    "mscale_all_dim": 0.5,  # unlike published models: both cosines and the scale of scores depend on the factor
}
MODELS: dict[str, dict[str, Any]] = {
    "yarn": {"rope_parameters": YARN},
    "as Kimi-K2": {"n_group": 1, "topk_group": 1},
    "without latents of queries": {"q_lora_rank": None},
    "dense": {"first_k_dense_replace": 2},
}
"""Three experts of eight in two groups of four, but for Kimi-K2. The first of two layers is dense."""


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("megatron-latents")
    for name, settings in MODELS.items():
        tiny_causal_lm("DeepseekV3ForCausalLM", {**SIZES, **settings}).save_pretrained(root / name)
    return root


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        pytest.param("yarn", {**TP2, "expert_parallel": 2, **FAST, **RECOMPUTED}, id="yarn, divided, fast, recomputed"),
        *(
            pytest.param("yarn", layout, marks=pytest.mark.thorough, id=f"yarn, {layout_name}")
            for layout_name, layout in {
                "one": {}, "tensor": TP2, "stages": PP2, "data": DP2, "experts": EP2, "data, fast": {**DP2, **FAST},
                "stages, fast, recomputed": {**PP2, **FAST, **RECOMPUTED},
                "three kinds, fast": {**THREE_KINDS, **FAST},
            }.items()
        ),
        *(
            pytest.param(name, layout, marks=pytest.mark.thorough, id=f"{name}, {layout_name}")
            for name in MODELS if name != "yarn"
            for layout_name, layout in {"one": {}, "tensor, fast": {**TP2, **FAST}}.items()
        ),
    ],
)  # fmt: skip
def test_numbers_are_those_of_transformers(name: str, settings: dict[str, Any], models: Path, tmp_path: Path) -> None:
    backend = fork_backend(models / name, tmp_path, max_batch_tokens=128, **settings)
    try:
        expected = None if name == "dense" else ReplayedExperts(num_layers=1, num_experts=8, top_k=3)
        assert backend.trainer_capabilities.replayed_experts == expected
        compare(ModelDriver(backend), models / name)
    finally:
        backend.close()


def passed(driver: ModelDriver, model_id: str, own: Datum, neighbours: list[Datum]) -> dict[str, Array]:
    """Return logprobs and gradients of a sequence between others, which have no loss."""
    before = driver.state(model_id)
    silent = [
        replace(each, loss_inputs={**each.loss_inputs, "weights": np.zeros(len(each.tokens_T), np.float32)})
        for each in neighbours
    ]
    output = driver.forward_backward(model_id, [silent[0], own, silent[1]])
    gradients = driver.state(model_id).gradients
    driver.backend.restore_state(model_id, before)
    return {"logprobs": logprobs_of(output)[1], **gradients}


def test_packed_neighbours_change_no_bit(models: Path, tmp_path: Path) -> None:
    """The tokens of the other two of three sequences in one stream. Experts would sort rows by these."""
    backend = fork_backend(models / "dense", tmp_path, **FAST)
    try:
        driver = ModelDriver(backend)
        model_id = driver.create_with(LoraConfig(rank=4, seed=7))
        state = driver.state(model_id)
        noise = np.random.default_rng(0)
        weights = {name: noise.normal(0, 0.02, w.shape).astype(np.float32) for name, w in state.weights.items()}
        backend.restore_state(model_id, replace(state, weights=weights))
        (own,) = ragged_data(0, VOCAB, (33,))
        one, other = (ragged_data(seed, VOCAB, (7, 20)) for seed in (1, 2))
        assert_same_arrays(
            passed(driver, model_id, own, one), passed(driver, model_id, own, other), "a pass beside other neighbours"
        )
    finally:
        backend.close()


BLOCK = 128


def in_fp8(matrix: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return numbers of 8 bits, the scale of each block of them, and the matrix that they represent."""
    counts = [-(-size // BLOCK) for size in matrix.shape]
    scales = torch.empty(counts)
    for row, column in np.ndindex(*counts):
        block = matrix[row * BLOCK : (row + 1) * BLOCK, column * BLOCK : (column + 1) * BLOCK]
        scales[row, column] = block.abs().max() / 448
    of_numbers = scales.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)[: matrix.shape[0], : matrix.shape[1]]
    numbers = (matrix / of_numbers).to(torch.float8_e4m3fn)
    return numbers, scales, numbers.float() * of_numbers


@pytest.mark.thorough
def test_fp8_files_are_read_as_published(tmp_path: Path) -> None:
    """As DeepSeek V3.1's, of several blocks, and divided over ranks within one."""
    plain, packed = tmp_path / "plain", tmp_path / "packed"
    tiny_causal_lm("DeepseekV3ForCausalLM", {**SIZES, "hidden_size": 160, "intermediate_size": 192}).save_pretrained(
        plain
    )
    tensors, files = load_file(plain / "model.safetensors"), dict[str, torch.Tensor]()
    for name, tensor in tensors.items():
        if tensor.ndim == 2 and not name.endswith(("embed_tokens.weight", "lm_head.weight", "mlp.gate.weight")):
            files[name], files[f"{name}_scale_inv"], tensors[name] = in_fp8(tensor)
        else:
            files[name] = tensor
    save_file(tensors, plain / "model.safetensors", metadata={"format": "pt"})
    packed.mkdir()
    save_file(files, packed / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((plain / "config.json").read_text())
    quantised = {"quant_method": "fp8", "weight_block_size": [BLOCK, BLOCK]}
    (packed / "config.json").write_text(json.dumps({**config, "quantization_config": quantised}))
    backend = fork_backend(packed, tmp_path, max_batch_tokens=128, **TP2, **FAST)
    try:
        compare(ModelDriver(backend), plain)
    finally:
        backend.close()
