"""PEFT attaches what is exported of layers that are not Llama's: it computes what the adapter's parts add up to."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from tinsmith.backend import ModelState
from tinsmith.operations import Array, LoraConfig
from tinsmith_checkpoints.format import write_peft_adapter
from tinsmith_checkpoints.huggingface import JoinedMatrix, joined_matrices, weight_name

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
SEES = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 32}
LORA = LoraConfig(rank=3, seed=0, alpha=5.0)


@pytest.mark.filterwarnings("ignore:Model .*tie_word_embeddings:UserWarning")
@pytest.mark.parametrize(
    ("class_name", "settings"),
    [
        ("Phi3ForCausalLM", SIZES),
        ("Qwen3_5ForCausalLM", HYBRID),
        ("Qwen3_5ForConditionalGeneration", {"text_config": HYBRID, "vision_config": SEES}),
    ],
)
def test_peft_attaches_an_export(tmp_path: Path, class_name: str, settings: dict[str, Any]) -> None:
    from peft import PeftModel  # here: it takes longer to import than all tests take to collect

    made = getattr(transformers, class_name)
    torch.manual_seed(0)
    model = made(made.config_class(**settings)).eval()
    model.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    weights, changes = adapter(model, joined_matrices(config))
    exported = tmp_path / "exported"
    exported.mkdir()
    write_peft_adapter(exported, ModelState(lora=LORA, weights=weights), base_model=str(tmp_path))
    tokens = torch.arange(20)[None]
    with torch.no_grad():
        before = model(tokens).logits
        attached = PeftModel.from_pretrained(made.from_pretrained(tmp_path).eval(), exported)
        logits = attached(tokens).logits
        for weight, delta in changes:
            weight.add_(delta)
        np.testing.assert_allclose(logits, model(tokens).logits, atol=1e-4)
    assert (logits - before).abs().max() > 0.01


def adapter(
    model: Any, joined: tuple[JoinedMatrix, ...]
) -> tuple[dict[str, Array], list[tuple[torch.Tensor, torch.Tensor]]]:
    """Return weights for all that a layer's modules project, by the decoder's names, and what they add to matrices."""
    rng, weights, changes = np.random.default_rng(0), dict[str, Array](), []

    def add(path: str, weight: torch.Tensor, rows: Array) -> None:
        A = rng.normal(scale=0.2, size=(LORA.rank, weight.shape[1])).astype(np.float32)
        B = rng.normal(scale=0.2, size=(len(rows), LORA.rank)).astype(np.float32)
        weights[weight_name(path, "A")], weights[weight_name(path, "B")] = A, B
        delta = torch.zeros_like(weight)
        delta[torch.tensor(rows)] = LORA.scale * torch.tensor(B @ A)
        changes.append((weight.data, delta))

    within = {matrix.path: matrix for matrix in joined}
    decoder = getattr(model.model, "language_model", model.model)
    for name, module in decoder.named_modules():
        path = f"model.{name}"
        matrix = within.get(".".join(name.split(".")[2:]))
        if matrix is not None:
            for part in matrix.modules:
                add(f"{path.removesuffix(matrix.path)}{part}", module.weight, matrix.rows_of(part))
        elif isinstance(module, torch.nn.Linear):
            add(path, module.weight, np.arange(module.out_features))
    return weights, changes
