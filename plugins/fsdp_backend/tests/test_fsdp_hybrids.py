"""Models with the gated delta rule or with latents, and the language part of those that see.

What is trained, and what is refused.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from fsdp_harness import LOSSES, VOCAB, fork_backend
from test_fsdp_modes import LENGTHS, TENANTS, add_tenants, make_trainer, run

from tinsmith import ConfigError, ForwardBackward, LoraConfig
from tinsmith.testing import ragged_data
from tinsmith.testing.int8_model import int8_config
from tinsmith_checkpoints.huggingface import DELTA, save_as_published, tiny_causal_lm, weight_counts
from tinsmith_fsdp.architecture import architecture_of, read_architecture
from tinsmith_fsdp.backend import owners
from tinsmith_fsdp.causal_lm import read_config
from tinsmith_fsdp.config import FsdpConfig
from tinsmith_fsdp.mesh import Mesh, join_mesh
from tinsmith_fsdp.probe import require_packing
from tinsmith_fsdp.streams import bare_stream
from tinsmith_workers import FAST_ISOLATION_ERROR, AdapterLayout, alone, deal, segments

pytestmark = pytest.mark.slow  # imports torch and transformers

SIZES = {"vocab_size": VOCAB, "num_hidden_layers": 4, "hidden_size": 32, "head_dim": 16, "tie_word_embeddings": False}
TEXT = {
    "text": "Qwen3_5ForCausalLM",
    "experts": "Qwen3_5MoeForCausalLM",
    "joined": "Qwen3NextForCausalLM",  # as the one before, with several modules in one matrix
    "latents": "DeepseekV3ForCausalLM",
}


@pytest.fixture(scope="module")
def mesh() -> Iterator[Mesh]:
    """One rank, in this process."""
    with alone() as worker, pytest.MonkeyPatch.context() as patch:
        patch.setenv("GLOO_SOCKET_IFNAME", "lo")
        yield join_mesh(worker, torch.device("cpu"), FsdpConfig())
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("fsdp-hybrids")
    for kind, name in TEXT.items():
        small(name).save_pretrained(root / kind)
    whole("Qwen3_5ForConditionalGeneration").save_pretrained(root / "sees")
    return root


def sizes_of(name: str) -> dict[str, Any]:
    """Heads of latents have sizes of their own."""
    without = {"head_dim"} if name.startswith(("Deepseek", "Kimi")) else set()
    return {key: value for key, value in SIZES.items() if key not in without}


def small(name: str) -> Any:
    return tiny_causal_lm(name, sizes_of(name))


def whole(name: str) -> Any:
    return tiny_causal_lm(name, sizes_of(name), {"tie_word_embeddings": False})


@pytest.mark.parametrize(
    ("kind", "checkpointing"), [("text", False), ("text", True), ("experts", True), ("latents", False)]
)
def test_tenants_in_one_stream_train_as_each_sequence_by_itself(
    kind: str, checkpointing: bool, mesh: Mesh, models: Path
) -> None:
    strict = make_trainer(models / kind, mesh)
    fast = make_trainer(models / kind, mesh, strict=False, checkpointing=checkpointing)
    for trainer in (strict, fast):
        add_tenants(trainer, 0.03)  # with 0.1, what rounding moves by 1e-7 moves logprobs by 6e-4
    for left, right in zip(run(strict, backward=True), run(fast, backward=True), strict=True):
        np.testing.assert_allclose(left, right, rtol=0, atol=FAST_ISOLATION_ERROR)
    for index in range(len(TENANTS)):
        one, two = (trainer.capture_adapter(f"m{index}") for trainer in (strict, fast))
        assert one is not None
        assert two is not None
        gap = np.linalg.norm(one.gradients - two.gradients)
        assert gap < 1e-5 * np.linalg.norm(one.gradients)


def test_packed_neighbours_change_no_bit(mesh: Mesh, models: Path) -> None:
    """Of another length or with other tokens, in the same stream."""
    trainer = make_trainer(models / "text", mesh, strict=False)
    trainer.create_model("m", LoraConfig(rank=4, seed=1))

    def logprobs(seed: int, length: int) -> Any:
        (own,) = ragged_data(0, VOCAB, (40,))
        (other,) = ragged_data(seed, VOCAB, (length,))
        work = list(segments([ForwardBackward(model_id="m", data=(other, own))], LOSSES))
        (micro,) = deal(work, 1, 4096)
        scored = trainer.run([micro[0]], [owners(micro)], backward=False, keeps=False)  # type: ignore[call-arg]
        return next(each.logp_TK for each in scored if each.index == 1)  # type: ignore[union-attr]

    first = logprobs(1, 33)
    np.testing.assert_array_equal(first, logprobs(2, 33))
    np.testing.assert_allclose(first, logprobs(2, 7), rtol=0, atol=FAST_ISOLATION_ERROR)


@pytest.mark.parametrize("kind", TEXT)
def test_neighbours_pass_nothing_to_each_other(kind: str, mesh: Mesh, models: Path) -> None:
    """No gradient reaches a neighbour's tokens, in either direction, and no NaN comes from there."""
    trainer = make_trainer(models / kind, mesh, strict=False)
    model = trainer.base.model
    embedding = model.embed_tokens.weight
    assert isinstance(embedding, torch.nn.Parameter)
    embedding.requires_grad_()
    first, second = torch.arange(33), torch.arange(100, 140)
    streams = [bare_stream([first, second])]
    for own, other, rows in ((first, second, slice(33)), (second, first, slice(33, None))):
        embedding.grad = None
        logits = model.logits(model.normed(streams, backward=False)[0])[rows]
        torch.log_softmax(logits, -1)[:, 0].sum().backward()
        assert embedding.grad is not None
        assert embedding.grad[own].abs().min(dim=1).values.max() > 0
        assert not embedding.grad[other].any()
        with torch.no_grad():
            kept = embedding[other].clone()
            embedding[other] = torch.nan
            beside = model.logits(model.normed(streams, backward=False)[0])[rows]
            embedding[other] = kept
        torch.testing.assert_close(beside, logits, rtol=0, atol=FAST_ISOLATION_ERROR)


def test_every_layer_adapts_what_it_has(models: Path) -> None:
    shape = read_architecture(models / "text")
    modules = AdapterLayout(LoraConfig(rank=1, seed=0), shape).pairs.keys()
    by_layer = [sorted(m.removeprefix(f"model.layers.{i}.") for m in modules if f".{i}." in m) for i in range(4)]
    assert set(DELTA) < set(by_layer[0])
    assert "self_attn.q_proj" in by_layer[1]
    assert by_layer[:2] == by_layer[2:]
    assert set(by_layer[0]) & set(by_layer[1]) == {"mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"}


@pytest.mark.parametrize("kind", TEXT)
def test_weights_are_counted(kind: str, models: Path) -> None:
    model = small(TEXT[kind])
    counts = weight_counts(read_architecture(models / kind))
    assert counts.total == sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize(
    "name",
    [
        "Qwen3_5ForConditionalGeneration",
        "Qwen3_5MoeForConditionalGeneration",
        "Kimi_K25ForConditionalGeneration",
        "Gemma3ForConditionalGeneration",
        pytest.param("Mistral3ForConditionalGeneration", marks=pytest.mark.thorough),
    ],
)
def test_the_language_part_of_a_model_that_sees_computes_what_the_whole_does(
    name: str, mesh: Mesh, tmp_path: Path
) -> None:
    model = whole(name)
    save_as_published(model, tmp_path)
    require_packing(name, read_config(tmp_path), None)
    trainer = make_trainer(tmp_path, mesh)
    trainer.create_model("m0", LoraConfig(rank=1, seed=0))
    found = run(trainer, backward=False, num_models=1)
    for logp_TK, datum in zip(found, ragged_data(0, VOCAB, LENGTHS), strict=True):
        logits = model(input_ids=torch.tensor(datum.tokens_T.astype(np.int64))[None]).logits[0]
        expected = torch.log_softmax(logits, -1).gather(-1, torch.tensor(datum.targets_TK))
        np.testing.assert_allclose(logp_TK, expected.detach().numpy(), rtol=0, atol=1e-5)


def test_what_hybrids_cannot_do_is_refused_by_name(models: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="max_full_models is 1, and the model is a Qwen3_5ForConditionalGeneration"):
        fork_backend(models / "sees", tmp_path, max_full_models=1)
    with pytest.raises(ConfigError, match=r"tensor_parallel is 2, .* the model is a Qwen3_5ForCausalLM"):
        fork_backend(models / "text", tmp_path, nproc_per_node=2, tensor_parallel=2)
    config = json.loads((models / "text" / "config.json").read_text())
    with pytest.raises(ConfigError, match="8-bit integers, which the fsdp backend does not train for models with the"):
        architecture_of({**config, "quantization_config": int8_config()}, Path("config.json"))
    with pytest.raises(ConfigError, match="layer_types must name linear_attention or full_attention for each of the 4"):
        architecture_of({**config, "layer_types": ["sliding_attention"] * 4}, Path("config.json"))
