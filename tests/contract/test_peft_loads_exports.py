"""PEFT itself loads what we export: every tensor used, the right shapes, and the deltas that were meant."""

import json
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers

from tinsmith.backend import ModelState
from tinsmith.checkpoints.saved import write_checkpoint
from tinsmith.operations import Array, LoraConfig
from tinsmith_checkpoints.huggingface.tiny_model import TinyShape, write_tiny_model

RANK = 4
ATTENTION = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj")
MLP = ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")


def make_shape(family: str, *, tied: bool) -> TinyShape:
    return TinyShape(
        family=family,  # type: ignore[arg-type]  # parametrised
        vocab_size=300,
        hidden_size=32,
        intermediate_size=48,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        tied=tied,
    )


def random_adapter(model: torch.nn.Module, modules: list[str]) -> dict[str, Array]:
    """Weights for these modules of the model, in canonical names and float32."""
    rng = np.random.default_rng(0)
    weights = {}
    for module in modules:
        out_features, in_features = model.get_submodule(module).weight.shape  # type: ignore[misc]
        for side, shape in (("A", (RANK, in_features)), ("B", (out_features, RANK))):
            name = f"base_model.model.{module}.lora_{side}.weight"
            weights[name] = (0.1 * rng.normal(size=shape)).astype(np.float32)
    return weights


@pytest.mark.filterwarnings("ignore:Model .*tie_word_embeddings:UserWarning")  # PEFT's advice on merging; not loading
@pytest.mark.parametrize(("family", "tied"), [("qwen3", True), ("qwen3", False), ("llama", False)])
@pytest.mark.parametrize("target", ["all", "attn", "mlp", "unembed"])
def test_peft_loads_an_export(tmp_path: Path, family: str, tied: bool, target: str) -> None:
    from peft import PeftModel  # here: it takes longer to import than all tests take to collect

    write_tiny_model(tmp_path / "base", make_shape(family, tied=tied))
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.float32)
    parts = {"attn": list(ATTENTION), "mlp": list(MLP), "unembed": []}
    inner = ATTENTION + MLP if target == "all" else parts[target]
    modules = [f"model.layers.{layer}.{module}" for layer in range(2) for module in inner]
    modules += ["lm_head"] if target in ("all", "unembed") else []
    weights = random_adapter(model, modules)
    lora = LoraConfig(rank=RANK, seed=0)
    write_checkpoint(
        tmp_path,
        "m/external_weights/x",
        kind="external",
        state=ModelState(lora=lora, weights=weights),
        base_model="tiny",
        user_metadata={},
        created_at=datetime.now(UTC),
        overwrite=False,
    )
    exported = tmp_path / "m/external_weights/x"
    config = json.loads((exported / "adapter_config.json").read_text())
    assert config["target_modules"] == sorted({module.rpartition(".")[2] for module in modules})

    tokens = torch.arange(20)[None]
    with torch.no_grad():
        base_logits = model(tokens).logits
        adapted = PeftModel.from_pretrained(model, exported)
        logits = adapted(tokens).logits
    loaded = {
        name.replace(".default", ""): parameter.numpy(force=True)
        for name, parameter in adapted.named_parameters()
        if ".lora_" in name
    }
    assert loaded.keys() == weights.keys()
    for name, array in weights.items():
        np.testing.assert_array_equal(loaded[name], array)
    np.testing.assert_allclose(logits, merged_logits(tmp_path / "base", weights, lora.scale, tokens), atol=1e-4)
    assert (logits - base_logits).abs().max() > 0.01


def merged_logits(base: Path, weights: dict[str, Array], scale: float, tokens: torch.Tensor) -> torch.Tensor:
    """Apply W + scale * B @ A by hand; a tied head gets its delta without the embedding's following."""
    model = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())
    with torch.no_grad():
        for name, a in weights.items():
            if name.endswith("lora_A.weight"):
                b = weights[name.replace("lora_A", "lora_B")]
                module = model.get_submodule(name.removeprefix("base_model.model.").removesuffix(".lora_A.weight"))
                module.weight.add_(scale * torch.tensor(b @ a))  # type: ignore[operator]
        return model(tokens).logits  # type: ignore[no-any-return]
