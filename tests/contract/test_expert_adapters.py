"""Adapters of experts leave in Tinker's layout and in PEFT's, and merge into each expert."""

from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from typer.testing import CliRunner

from tinsmith.backend import ModelState
from tinsmith.checkpoints.saved import write_checkpoint
from tinsmith.commands.cli import build_group
from tinsmith.errors import UnsupportedError
from tinsmith.operations import Array, LoraConfig
from tinsmith.plugins.loading import Plugins
from tinsmith_checkpoints.huggingface import save_as_published, tiny_causal_lm
from tinsmith_checkpoints.huggingface.safetensors_files import StoredTensors
from tinsmith_checkpoints.huggingface.tiny_model import TinyShape, write_tiny_model
from tinsmith_checkpoints.tools.adapters import complete

RANK = 4
SHAPE = TinyShape(
    family="qwen3_moe", vocab_size=300, hidden_size=32, intermediate_size=24, num_layers=2, num_heads=4,
    num_kv_heads=2, head_dim=16, num_experts=6, tied=False,
)  # fmt: skip
LORA = LoraConfig(rank=RANK, seed=0, train_unembed=False)
TOKENS = torch.arange(40)[None]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("experts") / "base"
    write_tiny_model(directory, SHAPE)
    return directory


def weights() -> dict[str, Array]:
    hidden, inner, experts = SHAPE.hidden_size, SHAPE.intermediate_size, SHAPE.num_experts
    shapes: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {}
    for layer in range(SHAPE.num_layers):
        prefix = f"model.layers.{layer}"
        shapes[f"{prefix}.self_attn.q_proj"] = (RANK, hidden), (SHAPE.num_heads * SHAPE.head_dim, RANK)
        for name in ("w1", "w3"):
            shapes[f"{prefix}.mlp.experts.{name}"] = (1, RANK, hidden), (experts, inner, RANK)
        shapes[f"{prefix}.mlp.experts.w2"] = (experts, RANK, inner), (1, hidden, RANK)
    rng = np.random.default_rng(0)
    return {
        f"base_model.model.{module}.lora_{side}.weight": (0.1 * rng.normal(size=shape)).astype(np.float32)
        for module, pair in shapes.items()
        for side, shape in zip("AB", pair, strict=True)
    }


@pytest.fixture
def checkpoint(base: Path, tmp_path: Path) -> Path:
    state = ModelState(lora=replace(LORA), weights=weights())
    write_checkpoint(
        tmp_path, "run/weights/x", kind="sampler", state=state, base_model=str(base), user_metadata={},
        created_at=datetime(2026, 1, 31, tzinfo=UTC), overwrite=False,
    )  # fmt: skip
    return tmp_path / "run/weights/x"


def ok(*arguments: object) -> str:
    plugins = Plugins.load()
    result = CliRunner().invoke(build_group(plugins), ["checkpoint", *map(str, arguments)], obj=plugins)
    assert result.exit_code == 0, result.output + repr(result.exception)
    return result.stdout


def logits(model: torch.nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(TOKENS).logits  # type: ignore[no-any-return]


@pytest.mark.filterwarnings("ignore:The following .* keys did not match:RuntimeWarning")  # those of parameters do
def test_peft_computes_what_the_merged_model_computes(base: Path, checkpoint: Path, tmp_path: Path) -> None:
    from peft import PeftModel  # here: it takes longer to import than all tests take to collect

    ok("export-peft", checkpoint, tmp_path / "peft")
    ok("merge", checkpoint, tmp_path / "merged")
    model = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    before = logits(model)
    adapted = PeftModel.from_pretrained(model, tmp_path / "peft")
    loaded = {name.replace(".default", "") for name, _ in adapted.named_parameters() if ".lora_" in name}
    assert loaded == set(StoredTensors.of(tmp_path / "peft", "adapter_model"))
    merged = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    torch.testing.assert_close(logits(merged), logits(adapted), rtol=0, atol=1e-4)
    assert (logits(merged) - before).abs().max() > 0.01


@pytest.mark.filterwarnings("ignore:The following .* keys did not match:RuntimeWarning")  # those of parameters do
def test_peft_computes_what_the_merged_model_computes_without_gates(tmp_path: Path) -> None:
    """With layers of Mamba-2, of which PEFT refuses the last matrix."""
    from peft import PeftModel

    base = tmp_path / "base"
    save_as_published(tiny_causal_lm("NemotronHForCausalLM", {"moe_latent_size": 40}), base)
    rng = np.random.default_rng(0)
    drawn = complete(LORA, {}, StoredTensors.of(base, "model").shapes(), fill=True)
    state = ModelState(
        lora=LORA, weights={name: (0.1 * rng.normal(size=x.shape)).astype(np.float32) for name, x in drawn.items()}
    )
    write_checkpoint(
        tmp_path, "run/weights/x", kind="sampler", state=state, base_model=str(base), user_metadata={},
        created_at=datetime(2026, 1, 31, tzinfo=UTC), overwrite=False,
    )  # fmt: skip
    ok("export-peft", tmp_path / "run/weights/x", tmp_path / "peft")
    ok("merge", tmp_path / "run/weights/x", tmp_path / "merged")
    model = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    before = logits(model)
    adapted = PeftModel.from_pretrained(model, tmp_path / "peft")
    loaded = {name.replace(".default", "") for name, _ in adapted.named_parameters() if ".lora_" in name}
    assert loaded == set(StoredTensors.of(tmp_path / "peft", "adapter_model"))
    merged = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    torch.testing.assert_close(logits(merged), logits(adapted), rtol=0, atol=1e-4)
    assert (logits(merged) - before).abs().max() > 0.01


def test_each_expert_gets_its_own_part(base: Path, checkpoint: Path, tmp_path: Path) -> None:
    ok("merge", checkpoint, tmp_path / "merged")
    before, after, of = StoredTensors.of(base, "model"), StoredTensors.of(tmp_path / "merged", "model"), weights()
    for name, module in (("w1", "gate_proj"), ("w3", "up_proj"), ("w2", "down_proj")):
        A, B = (of[f"base_model.model.model.layers.1.mlp.experts.{name}.lora_{side}.weight"] for side in "AB")
        for expert in range(SHAPE.num_experts):
            delta = B[min(expert, len(B) - 1)] @ A[min(expert, len(A) - 1)]
            weight = f"model.layers.1.mlp.experts.{expert}.{module}.weight"
            np.testing.assert_allclose(after[weight] - before[weight], LORA.scale * delta, rtol=0, atol=1e-5)


def test_tinkers_layout_keeps_the_bits(base: Path, checkpoint: Path, tmp_path: Path) -> None:
    ok("export-peft", checkpoint, tmp_path / "tinker", "--head", "unembed_tokens")
    stored = StoredTensors.of(tmp_path / "tinker", "adapter_model")
    assert set(stored) == set(weights())
    for name, array in weights().items():
        np.testing.assert_array_equal(stored[name], array)
    ok("export-peft", tmp_path / "tinker", tmp_path / "from_tinker")
    ok("export-peft", checkpoint, tmp_path / "peft")
    ours, theirs = (StoredTensors.of(tmp_path / name, "adapter_model") for name in ("peft", "from_tinker"))
    assert set(ours) == set(theirs)
    for name, array in ours.items():
        np.testing.assert_array_equal(array, theirs[name])
    assert "no faults" in ok("verify", tmp_path / "tinker", "--base-model", base)


def test_missing_experts_start_fresh(base: Path) -> None:
    """An import completes what a foreign adapter leaves out, at zero effect."""
    whole = {name: array for name, array in weights().items() if ".mlp." in name}
    lora = replace(LORA, train_attn=False)
    part = {name: array for name, array in whole.items() if ".layers.1.mlp.experts.w2." not in name}
    shapes = StoredTensors.of(base, "model").shapes()
    with pytest.raises(UnsupportedError, match=r"leaves out 1 modules .*w2, such as model.layers.1.mlp.experts.w2"):
        complete(lora, part, shapes, fill=False)
    completed = complete(lora, part, shapes, fill=True)
    assert {name: array.shape for name, array in completed.items()} == {n: a.shape for n, a in whole.items()}
    assert not completed["base_model.model.model.layers.1.mlp.experts.w2.lora_B.weight"].any()
