"""Classes of transformers: those that are trained compute what transformers computes, the others are refused by name.

A probe finds out which they are, on a small model.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import transformers
from fsdp_harness import LOSSES, VOCAB
from test_fsdp_modes import LENGTHS, TENANTS, add_tenants, make_trainer, run, tensors_of
from transformers.models.llama import modeling_llama

from tinsmith import Array, ConfigError, Datum, ForwardBackward, LoraConfig
from tinsmith.testing import assert_close_arrays, ragged_data
from tinsmith_checkpoints.huggingface import deltas, tiny_causal_lm, tiny_config
from tinsmith_checkpoints.huggingface.places import Place, weight_places
from tinsmith_fsdp import probe
from tinsmith_fsdp.architecture import architecture_of
from tinsmith_fsdp.config import FsdpConfig
from tinsmith_fsdp.mesh import Mesh, join_mesh
from tinsmith_fsdp.probe import require_packing
from tinsmith_workers import alone, deal, segments

pytestmark = [
    pytest.mark.slow,  # imports torch and transformers
    pytest.mark.filterwarnings("ignore::UserWarning:transformers"),
]

SIZES: Mapping[str, Any] = {
    "vocab_size": VOCAB,
    "pad_token_id": None,
    "eos_token_id": None,
    "tie_word_embeddings": False,
}
FAMILIES = (
    "Gemma2ForCausalLM",
    "Qwen3_5ForCausalLM",
    "Qwen2ForCausalLM",
    "MistralForCausalLM",
    "LlamaForCausalLM",
    "Qwen3ForCausalLM",
    "GemmaForCausalLM",
    "Gemma3ForCausalLM",
    "Olmo2ForCausalLM",
    "Olmo3ForCausalLM",
    "SmolLM3ForCausalLM",
    "GraniteForCausalLM",
    "Cohere2ForCausalLM",
    "SeedOssForCausalLM",
    "Phi3ForCausalLM",
)
SHORT = 4  # of these, for `make test`
ADAPTED = (
    *("Phi3ForCausalLM", "GptOssForCausalLM", "Qwen2MoeForCausalLM", "Qwen3MoeForCausalLM"),
    *("Qwen3_5MoeForCausalLM", "Qwen3NextForCausalLM", "DeepseekV3ForCausalLM"),
)
"""Classes that have several modules in one matrix, or experts. The last has latents, and a dense layer first."""
COMPANY = (*TENANTS, LoraConfig(rank=4, seed=4))
"""The first and the last train experts in one stream."""


@pytest.fixture(scope="module")
def mesh() -> Iterator[Mesh]:
    """One rank, in this process."""
    with alone() as worker, pytest.MonkeyPatch.context() as patch:
        patch.setenv("GLOO_SOCKET_IFNAME", "lo")
        yield join_mesh(worker, torch.device("cpu"), FsdpConfig())
    dist.destroy_process_group()


def config_of(name: str, **settings: Any) -> Any:
    return tiny_config(name, {**SIZES, **settings})


def write_model(name: str, directory: Path) -> Any:
    model = tiny_causal_lm(name, SIZES)
    model.set_attn_implementation("eager")  # the only one that knows soft caps
    model.save_pretrained(directory)
    return model


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[] if n < SHORT else pytest.mark.thorough) for n, name in enumerate(FAMILIES)],
)
def test_a_family_trains_as_transformers_does(name: str, mesh: Mesh, tmp_path: Path) -> None:
    """Logprobs of packed sequences, and the gradients of all weights, against each sequence by itself."""
    model = write_model(name, tmp_path / "model")
    require_packing(name, model.config, None)
    trainer = make_trainer(tmp_path / "model", mesh, strict=False)
    trainer.create_full_model("m")
    data = ragged_data(0, VOCAB, LENGTHS)
    op = ForwardBackward(model_id="m", data=tuple(data))
    micros = [micro[0] for micro in deal(list(segments([op], LOSSES)), 1, 4096)]
    assert len(micros) == 1, "the sequences are packed"
    scored = trainer.run_full("m", micros, True)
    for datum, own in zip(data, sorted(scored, key=lambda each: each.index), strict=True):  # type: ignore[union-attr, arg-type, return-value]
        np.testing.assert_allclose(own.logp_TK, differentiated(model, datum), rtol=0, atol=1e-4)  # type: ignore[union-attr]
    expected = {
        key: parameter.grad.numpy() for key, parameter in model.named_parameters() if parameter.grad is not None
    }
    found = tensors_of(trainer, "gradients", tmp_path / "state")
    assert found.keys() == expected.keys()
    assert_close_arrays(found, expected, 1e-4, "gradients")


@pytest.mark.parametrize("strict", [False, pytest.param(True, marks=pytest.mark.thorough)])
@pytest.mark.parametrize("name", ADAPTED)
def test_adapters_train_as_merged_weights_do(name: str, strict: bool, mesh: Mesh, tmp_path: Path) -> None:
    """Tenants in one stream, or each sequence in its own, against models with their adapters added to the weights.

    A change of W changes A and B by what the chain rule says: W + scale * B A.
    """
    require_packing(name, write_model(name, tmp_path / "model").config, None)
    trainer = make_trainer(tmp_path / "model", mesh, strict=strict)
    add_tenants(trainer, 0.03, COMPANY)  # which changes the weights by about a third
    found = iter(run(trainer, backward=True, num_models=len(COMPANY)))
    for index, lora in enumerate(COMPANY):
        adapter = trainer.adapters[f"m{index}"]
        weights, gradients = (
            adapter.layout.named(flat.numpy()) for flat in (adapter.weights, not_none(adapter.gradients))
        )
        model, places = merged(name, weights, lora.scale)
        for datum in ragged_data(index, VOCAB, LENGTHS):
            np.testing.assert_allclose(next(found), differentiated(model, datum), rtol=0, atol=1e-4)
        expected = {name: np.zeros_like(value) for name, value in gradients.items()}
        for changed, delta in deltas({key: value.shape for key, value in weights.items()}).items():
            place = places[changed]
            d_W = not_none(model.get_parameter(place.tensor).grad).numpy()[place.index]
            d_W = lora.scale * (d_W.T if place.transposed else d_W)
            A, B = delta.factors(weights)
            d_A, d_B = delta.factors(expected)  # views
            d_A += B.T @ d_W
            d_B += d_W @ A.T
        assert_close_arrays(gradients, expected, 1e-4, f"gradients of tenant {index}")


def merged(name: str, weights: Mapping[str, Array], scale: float) -> tuple[Any, Mapping[str, Place]]:
    """Return the model with an adapter in its weights, and where each weight is."""
    model = tiny_causal_lm(name, SIZES)
    model.set_attn_implementation("eager")
    model.set_experts_implementation("eager")  # the only one in float64
    tensors = {key: value.data.numpy() for key, value in model.named_parameters()}
    config = {**model.config.to_dict(), "architectures": [name]}
    places = weight_places(config, {key: value.shape for key, value in tensors.items()})
    for changed, delta in deltas({key: value.shape for key, value in weights.items()}).items():
        A, B = delta.factors(weights)
        places[changed].add(scale * (B @ A), tensors[places[changed].tensor])
    return model.double(), places


def differentiated(model: Any, datum: Datum) -> Array:
    """Return the logprobs of a sequence by itself. Its gradient is added to the model's."""
    logits = model(torch.tensor(datum.tokens_T.astype(np.int64))[None]).logits[0]
    logp_TK = torch.log_softmax(logits, -1).gather(-1, torch.tensor(datum.targets_TK))
    weights = torch.tensor(datum.loss_inputs["weights"]).reshape(len(logp_TK), -1)
    (-(weights * logp_TK).sum()).backward()
    found: Array = logp_TK.detach().numpy()
    return found


def not_none(tensor: torch.Tensor | None) -> torch.Tensor:
    assert tensor is not None
    return tensor


def test_sequences_are_within_the_short_frequencies_of_longrope() -> None:
    rope = {"rope_type": "longrope", "short_factor": [1.0] * 8, "long_factor": [2.0] * 8, "factor": 4.0}
    for given in ({"rope_parameters": {**rope, "original_max_position_embeddings": 64}}, {"rope_scaling": rope}):
        config = config_of("Phi3ForCausalLM").to_dict() | {"rope_parameters": None, **given}
        config |= {"architectures": ["Phi3ForCausalLM"], "original_max_position_embeddings": 64}
        assert architecture_of(config, Path("config.json")).max_position == 64
        with pytest.raises(ConfigError, match=r"max_context_tokens is 65, .* sequences of more than 64 tokens"):
            architecture_of(config, Path("config.json"), 65)


def test_windows_and_sinks_are_those_of_transformers() -> None:
    require_packing("GptOssForCausalLM", config_of("GptOssForCausalLM"), None)


def test_layers_that_let_neighbours_leak_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without kernels for GPUs, transformers computes the gated delta rule by code that ignores where sequences end."""
    monkeypatch.setattr("tinsmith_fsdp.causal_lm.is_gated_delta", lambda _: False)
    with pytest.raises(
        ConfigError, match=r"Qwen3_5ForCausalLM of transformers .* packed side by side change each other"
    ):
        require_packing("Qwen3_5ForCausalLM", config_of("Qwen3_5ForCausalLM"), None)


def test_attention_of_another_kind_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """An argument that our attention does not know changes no neighbour, but the numbers."""

    def shifted(module: torch.nn.Module, hidden_states: torch.Tensor, **named: Any) -> Any:
        if module.config._attn_implementation == "eager":  # type: ignore[union-attr]  # noqa: SLF001 - where layers look
            hidden_states = hidden_states * 1.001
        return forward(module, hidden_states, **named)

    forward = modeling_llama.LlamaAttention.forward
    monkeypatch.setattr(modeling_llama.LlamaAttention, "forward", shifted)
    with pytest.raises(ConfigError, match=r"LlamaForCausalLM .* differ from transformers' own forward pass"):
        require_packing("LlamaForCausalLM", config_of("LlamaForCausalLM"), None)


def test_models_built_in_another_way_are_refused() -> None:
    config = transformers.MambaConfig(vocab_size=VOCAB, hidden_size=32, num_hidden_layers=2, state_size=4)
    with pytest.raises(ConfigError, match=r"MambaForCausalLM .* it has no model.embed_tokens"):
        require_packing("MambaForCausalLM", config, None)


def test_a_probe_runs_once_for_a_class_and_its_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[str] = []

    def refuse(name: str, small: Mapping[str, Any]) -> str:
        tried.append(name)
        return "as told"

    monkeypatch.setattr(probe, "tried", refuse)
    for size in (32, 64, 64):  # sizes change nothing, kinds of layers do
        with pytest.raises(ConfigError, match="as told"):
            require_packing("LlamaForCausalLM", config_of("LlamaForCausalLM", intermediate_size=size), tmp_path)
    assert len(tried) == 1
    with pytest.raises(ConfigError, match="as told"):
        require_packing("LlamaForCausalLM", config_of("LlamaForCausalLM", attention_bias=True), tmp_path)
    assert len(tried) == 2
    for kept in tmp_path.iterdir():
        kept.write_text("{")
    monkeypatch.setattr(probe, "tried", lambda *_: "")
    require_packing("LlamaForCausalLM", config_of("LlamaForCausalLM"), tmp_path)  # a broken file is written anew
    monkeypatch.setattr(probe, "tried", refuse)
    require_packing("LlamaForCausalLM", config_of("LlamaForCausalLM"), tmp_path)


@pytest.mark.parametrize("setting", ["is_causal", "is_encoder_decoder", "add_cross_attention"])
def test_models_of_which_tokens_see_others_are_refused_by_name(setting: str) -> None:
    config = {**config_of("LlamaForCausalLM").to_dict(), "architectures": ["LlamaForCausalLM"]}
    architecture_of(config, Path("config.json"))
    usual = setting == "is_causal"
    architecture_of({**config, setting: usual}, Path("config.json"))
    with pytest.raises(ConfigError, match=f"a LlamaForCausalLM .* is not supported: {setting} is {not usual}: "):
        architecture_of({**config, setting: not usual}, Path("config.json"))
