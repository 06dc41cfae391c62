"""Models with experts: on several ranks, from files of several forms, and what is refused."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from fsdp_harness import VOCAB, fork_backend, shape
from fsdp_runs import train_three_ranks
from safetensors.torch import save_file

from tinsmith import ConfigError
from tinsmith.testing import TrainingBackendContract, assert_same_state, write_tiny_model
from tinsmith.testing.int8_model import int8_config
from tinsmith_checkpoints.huggingface import WeightFiles, tiny_causal_lm, tiny_config
from tinsmith_fsdp.architecture import architecture_of
from tinsmith_fsdp.backend import FsdpBackend
from tinsmith_fsdp.expert_files import ExpertFiles
from tinsmith_fsdp.grouped import grouped

pytestmark = pytest.mark.slow  # imports torch, and starts ranks


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Five experts in each layer: ranks hold different numbers of them."""
    directory = tmp_path_factory.mktemp("experts") / "model"
    write_tiny_model(directory, shape("qwen3_moe", num_experts=5))
    return directory


@pytest.fixture(scope="module")
def two_expert_ranks(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[FsdpBackend]:
    backend = fork_backend(model, tmp_path_factory.mktemp("cache"), nproc_per_node=2, max_full_models=0)
    yield backend
    backend.close()


def test_one_rank_and_two_compute_the_same_bits(model: Path, two_expert_ranks: FsdpBackend, tmp_path: Path) -> None:
    """Ranks divide the experts, and compute each sequence by itself."""
    one_rank = fork_backend(model, tmp_path, nproc_per_node=1, max_full_models=0)
    try:
        (logps, losses, states), found = train_three_ranks(one_rank), train_three_ranks(two_expert_ranks)
    finally:
        one_rank.close()
    for left, right in zip(logps, found[0], strict=True):
        np.testing.assert_array_equal(left, right)
    assert losses == found[1]
    for one, two in zip(states, found[2], strict=True):
        assert_same_state(two, one, "two ranks against one")


@pytest.mark.thorough
class TestFsdpTrainingExperts(TrainingBackendContract):
    @pytest.fixture
    def backend(self, two_expert_ranks: FsdpBackend) -> FsdpBackend:
        return two_expert_ranks


def test_experts_are_read_from_files_of_every_form(tmp_path: Path) -> None:
    """By themselves, as Qwen's; joined; and in MXFP4, of which any two numbers in a byte are numbers."""
    made = tiny_causal_lm("Qwen3MoeForCausalLM", {"vocab_size": VOCAB})
    made.save_pretrained(tmp_path / "apart")
    whole = {name: tensor for name, tensor in made.state_dict().items() if ".mlp.experts." in name}
    for kind in ("joined", "mxfp4"):
        (tmp_path / kind).mkdir()
    save_file(whole, tmp_path / "joined" / "model.safetensors")
    name, tensor = next(iter(whole.items()))
    experts, inputs, outputs = tensor.shape
    blocks = torch.randint(0, 256, (experts, outputs, inputs // 32, 16), dtype=torch.uint8)
    scales = torch.full(blocks.shape[:-1], 128, dtype=torch.uint8)
    save_file({f"{name}_blocks": blocks, f"{name}_scales": scales}, tmp_path / "mxfp4" / "model.safetensors")
    own = slice(1, 3)
    for kind in ("apart", "joined", "mxfp4"):
        with WeightFiles(tmp_path / kind, framework="pt") as files, ExpertFiles(tmp_path / kind, files) as of_experts:
            assert of_experts.has(name) == (kind != "joined")
            read = of_experts if kind != "joined" else files
            found = read.part(name, tuple(tensor.shape), own if kind != "joined" else (own,))  # type: ignore[arg-type]
        if kind == "mxfp4":
            numbers = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6]) * 2
            pairs = torch.stack([numbers[(blocks & 15).long()], numbers[(blocks >> 4).long()]], -1)
            torch.testing.assert_close(found, pairs.flatten(2).transpose(1, 2)[own], rtol=0, atol=0)
        else:
            torch.testing.assert_close(found, tensor[own], rtol=0, atol=0)


def test_more_groups_than_a_kernel_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every tenant's part of every expert is one."""
    monkeypatch.setattr("tinsmith_fsdp.grouped.MOST_GROUPS", 3)
    kernel = torch.nn.functional.grouped_mm
    asked: list[int] = []

    def limited(a: torch.Tensor, b: torch.Tensor, *, offs: torch.Tensor) -> torch.Tensor:
        asked.append(len(offs))
        return kernel(a, b, offs=offs)

    monkeypatch.setattr("tinsmith_fsdp.grouped.F.grouped_mm", limited)
    ends = torch.tensor([2, 2, 5, 9, 9, 12, 12, 13], dtype=torch.int32)
    x = torch.randn(13, 16, dtype=torch.bfloat16, requires_grad=True)
    w = torch.randn(8, 24, 16, dtype=torch.bfloat16, requires_grad=True)
    grouped(x, w, ends).float().square().sum().backward()
    found = [not_none(x.grad).float(), not_none(w.grad).float()]
    assert sorted(asked) == [2] * 3 + [3] * 6
    x.grad = w.grad = None
    parts = zip(x.tensor_split(ends[:-1].tolist()), w, strict=True)
    torch.cat([rows @ each.T for rows, each in parts]).float().square().sum().backward()
    torch.testing.assert_close(found, [not_none(x.grad).float(), not_none(w.grad).float()], rtol=0.02, atol=0.05)


def not_none(tensor: torch.Tensor | None) -> torch.Tensor:
    assert tensor is not None
    return tensor


def test_integers_of_experts_are_refused() -> None:
    config = tiny_config("Qwen3MoeForCausalLM").to_dict() | {"architectures": ["Qwen3MoeForCausalLM"]}
    with pytest.raises(ConfigError, match=r"Qwen3MoeForCausalLM has experts of 8-bit integers"):
        architecture_of(config | {"quantization_config": int8_config()}, Path("config.json"))


def test_full_fine_tuning_is_refused(model: Path, two_expert_ranks: FsdpBackend, tmp_path: Path) -> None:
    assert two_expert_ranks.max_full_models == 0
    with pytest.raises(ConfigError, match=r"max_full_models is 1, and the fsdp backend trains adapters of experts"):
        fork_backend(model, tmp_path, max_full_models=1)


def test_layers_of_another_kind_are_refused_at_the_start(tmp_path: Path) -> None:
    """A dense layer before those with experts."""
    made = tiny_causal_lm(
        "Glm4MoeForCausalLM", {"first_k_dense_replace": 1, "n_routed_experts": 8, "num_experts_per_tok": 2}
    )
    made.save_pretrained(tmp_path / "model")
    with pytest.raises(ConfigError, match=r"model\.layers\.0\.\S+ should be .*: the fsdp backend trains"):
        fork_backend(tmp_path / "model", tmp_path / "cache", nproc_per_node=1, max_full_models=0)
