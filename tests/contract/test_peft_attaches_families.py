"""Adapters of layers that are not Llama's: what PEFT attaches, and what merging writes, compute what was trained."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from tinsmith.backend import ModelState
from tinsmith.operations import Array, LoraConfig
from tinsmith_checkpoints.format import write_adapter
from tinsmith_checkpoints.huggingface import JoinedMatrix, joined_matrices, weight_name
from tinsmith_checkpoints.tools.contents import open_contents
from tinsmith_checkpoints.tools.rewriting import export_peft, merge
from tinsmith_checkpoints.tools.verifying import faults

SIZES = {
    "vocab_size": 120,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "bos_token_id": None,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
HYBRID = {
    **SIZES,
    "head_dim": 8,
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 4,
}
EXPERTS = {
    **HYBRID,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
}
LATENTS = {
    **SIZES,
    "num_key_value_heads": 4,
    "q_lora_rank": 12,
    "kv_lora_rank": 10,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 6,
    "first_k_dense_replace": 1,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "n_group": 2,
    "topk_group": 1,
}
SEES = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 32}
LORA = LoraConfig(rank=3, seed=0, alpha=5.0)


@pytest.mark.filterwarnings("ignore:The following .* keys did not match:RuntimeWarning")  # those of parameters do
@pytest.mark.filterwarnings("ignore:Model .*tie_word_embeddings:UserWarning")
@pytest.mark.parametrize(
    ("class_name", "settings"),
    [
        ("Phi3ForCausalLM", SIZES),
        ("Qwen3_5ForCausalLM", HYBRID),
        ("Qwen3_5MoeForCausalLM", EXPERTS),
        ("Qwen3NextForCausalLM", EXPERTS),
        ("DeepseekV3ForCausalLM", LATENTS),
        ("GptOssForCausalLM", {**SIZES, "head_dim": 8, "num_local_experts": 4, "num_experts_per_tok": 2}),
        ("Qwen3_5ForConditionalGeneration", {"text_config": HYBRID, "vision_config": SEES}),
    ],
)
def test_an_adapter_is_exported_and_merged(tmp_path: Path, class_name: str, settings: dict[str, Any]) -> None:
    from peft import PeftModel  # here: it takes longer to import than all tests take to collect

    made = getattr(transformers, class_name)
    torch.manual_seed(0)
    model = made(made.config_class(**settings)).eval()
    model.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    weights, changes = adapter(model, joined_matrices(config))
    adapter_only, exported, merged = (tmp_path / name for name in ("adapter", "exported", "merged"))
    adapter_only.mkdir()
    write_adapter(adapter_only, ModelState(lora=LORA, weights=weights), base_model=str(tmp_path))
    contents = open_contents(adapter_only)
    assert list(faults(contents, tmp_path, lambda _: None)) == []
    export_peft(contents, exported, base_model=None, force=False, progress=lambda _: None)
    merge(contents, tmp_path, merged, dtype=None, shard_bytes=1 << 30, force=False, progress=lambda _: None)
    tokens = torch.arange(20)[None]
    with torch.no_grad():
        before = model(tokens).logits
        attached = PeftModel.from_pretrained(made.from_pretrained(tmp_path).eval(), exported)
        logits = attached(tokens).logits
        for weight, delta in changes:
            weight.add_(delta)
        np.testing.assert_allclose(logits, model(tokens).logits, atol=1e-4)
        np.testing.assert_allclose(made.from_pretrained(merged).eval()(tokens).logits, model(tokens).logits, atol=1e-5)
    assert (logits - before).abs().max() > 0.01


def adapter(
    model: Any, joined: tuple[JoinedMatrix, ...]
) -> tuple[dict[str, Array], list[tuple[torch.Tensor, torch.Tensor]]]:
    """Return weights for all that a layer's modules project, by the decoder's names, and what they add to matrices."""
    alternate = type(model).__name__ == "GptOssForCausalLM"  # gate and up, and its matrices are [E, in, out]
    rng, weights, changes = np.random.default_rng(0), dict[str, Array](), []

    def add(path: str, weight: torch.Tensor, rows: Array) -> None:
        A = rng.normal(scale=0.2, size=(LORA.rank, weight.shape[1])).astype(np.float32)
        B = rng.normal(scale=0.2, size=(len(rows), LORA.rank)).astype(np.float32)
        weights[weight_name(path, "A")], weights[weight_name(path, "B")] = A, B
        delta = torch.zeros_like(weight)
        delta[torch.tensor(rows)] = LORA.scale * torch.tensor(B @ A)
        changes.append((weight.data, delta))

    def add_experts(path: str, weight: torch.Tensor, names: tuple[str, ...]) -> None:
        """The side that faces the hidden states is shared by the experts."""
        of_experts = weight.transpose(1, 2) if alternate else weight
        number, outputs, inputs = of_experts.shape
        size = outputs // len(names)
        delta = torch.zeros_like(weight)
        rows = delta.transpose(1, 2) if alternate else delta
        for i, name in enumerate(names):
            shared_A = len(names) == 2
            A = rng.normal(scale=0.2, size=(1 if shared_A else number, LORA.rank, inputs)).astype(np.float32)
            B = rng.normal(scale=0.2, size=(number if shared_A else 1, size, LORA.rank)).astype(np.float32)
            weights[weight_name(f"{path}.{name}", "A")], weights[weight_name(f"{path}.{name}", "B")] = A, B
            own = slice(i, None, len(names)) if alternate else slice(i * size, (i + 1) * size)
            rows[:, own] = LORA.scale * torch.tensor(B @ A)
        changes.append((weight.data, delta))

    within = {matrix.path: matrix for matrix in joined}
    decoder = getattr(model.model, "language_model", model.model)
    for name, module in decoder.named_modules():
        path = f"model.{name}"
        matrix = within.get(".".join(name.split(".")[2:]))
        if matrix is not None:
            for part in matrix.modules:
                add(f"{path.removesuffix(matrix.path)}{part}", module.weight, matrix.rows_of(part))
        elif name.endswith(".mlp.experts"):
            add_experts(path, module.gate_up_proj, ("w1", "w3"))
            add_experts(path, module.down_proj, ("w2",))
        elif isinstance(module, torch.nn.Linear) and not name.endswith("shared_expert_gate"):
            add(path, module.weight, np.arange(module.out_features))
    return weights, changes
