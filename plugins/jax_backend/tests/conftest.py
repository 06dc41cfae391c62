"""Tiny random models, written once per test run with transformers, and the backends that several files share."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from few_programs import FEW_PROGRAMS, SHAPE, make_jax_cache
from jax_harness import VOCAB, as_shipped, compile_quickly, make_backend

from tinsmith_checkpoints.huggingface.tiny_model import write_tiny_model as write_shape
from tinsmith_jax.backend import JaxBackend

_SIZES = {
    "vocab_size": 160,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 2048,
    "bos_token_id": None,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "attention_dropout": 0.0,
    "initializer_range": 0.15,  # far from zero, so that attention and the loss have structure
}
_EXPERTS = {
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 48,
    "norm_topk_prob": True,
    "tie_word_embeddings": False,
    "initializer_range": 0.12,  # a router that is nearly undecided amplifies the rounding errors below it
}
_WITH_PROGRAMS_OF_THEIR_OWN = (
    "test_several_targets_per_token",
    "test_tokens_without_experts_are_the_routers",
    "test_replay_does_not_reach_others",
    "test_routers_own_choice_is_counted",
    "test_given_experts_compute_in_any_order",
    "test_gradient_is_that_of_the_given_experts",
    "test_metrics_tell_how_evenly_experts_were_used",
)
_OF_FAMILIES = "test_logprobs"
_QWEN3_ROPE = {"rope_type": "default", "rope_theta": 1e6}
_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


def write_tiny_model(directory: Path, kind: str) -> Path:
    """Write one of qwen3, qwen3_untied, qwen3_moe, llama3 as a float32 Hugging Face directory."""
    import torch  # here, because the process that deals out the tests imports this module, too
    from transformers import (
        LlamaConfig,
        LlamaForCausalLM,
        Qwen3Config,
        Qwen3ForCausalLM,
        Qwen3MoeConfig,
        Qwen3MoeForCausalLM,
    )

    torch.manual_seed(0)
    if kind == "llama3":
        config = LlamaConfig(**_SIZES, tie_word_embeddings=False, rope_parameters=_LLAMA3_ROPE)
        model = LlamaForCausalLM(config)
    elif kind == "qwen3_moe":
        config = Qwen3MoeConfig(**{**_SIZES, **_EXPERTS}, rope_parameters=_QWEN3_ROPE)
        model = Qwen3MoeForCausalLM(config)
    else:
        config = Qwen3Config(**_SIZES, tie_word_embeddings=kind == "qwen3", rope_parameters=_QWEN3_ROPE)
        model = Qwen3ForCausalLM(config)
    for name, parameter in model.named_parameters():
        if "norm" in name:
            torch.nn.init.uniform_(parameter, 0.5, 1.5)
    model.save_pretrained(directory)
    return directory


@pytest.hookimpl(tryfirst=True)  # before tests are deselected by their marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leave tests of the shipped suites to `make test-all` that need programs of their own.

    In `make test`, test_jax_parity.py compares several targets per token with torch, and test_jax_routing_replay.py
    logprobs, gradients and metrics of replayed sequences, the given experts in another order, too. test_families.py
    compares logprobs.
    """
    for item in items:
        here = item.path.parent == Path(__file__).parent and isinstance(item, pytest.Function)
        if here and item.cls is not None and item.originalname in _WITH_PROGRAMS_OF_THEIR_OWN:
            item.add_marker(pytest.mark.thorough)
        if here and item.path.name == "test_families.py" and item.cls is not None and item.originalname != _OF_FAMILIES:
            item.add_marker(pytest.mark.thorough)


@pytest.fixture(scope="session")
def tiny_models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    return {kind: write_tiny_model(root / kind, kind) for kind in ("qwen3", "qwen3_untied", "qwen3_moe", "llama3")}


@pytest.fixture(scope="session")
def spelled(tiny_models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny Qwen3 with a tokenizer: token n is one letter or two."""
    from tokenizers import Tokenizer, decoders, models

    directory = tmp_path_factory.mktemp("spelled")
    for file in tiny_models["qwen3"].iterdir():
        (directory / file.name).symlink_to(file)
    letters = "abcdefghijklmnopqrstuvwxyz"
    words = [*letters, *(first + second for first in letters for second in letters)][:VOCAB]
    tokenizer = Tokenizer(models.WordLevel({word: n for n, word in enumerate(words)}, unk_token="a"))
    tokenizer.decoder = decoders.Fuse()
    tokenizer.save(str(directory / "tokenizer.json"))
    return directory


@pytest.fixture(scope="session")
def contract_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with a tokenizer."""
    directory = tmp_path_factory.mktemp("contract") / "tiny"
    write_shape(directory, SHAPE)
    return directory


@pytest.fixture(scope="session")
def contract_model_with_experts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("contract") / "experts"
    write_shape(directory, replace(SHAPE, family="qwen3_moe", num_experts=6))
    return directory


@pytest.fixture(scope="session")
def contract_model_of_bfloat16(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of sizes that the kernels for CPUs multiply in bfloat16."""
    directory = tmp_path_factory.mktemp("contract") / "bfloat16"
    write_shape(directory, replace(SHAPE, dtype="bfloat16", intermediate_size=64))
    return directory


@pytest.fixture(scope="session")
def jax_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One compile cache for all backends of the process: JAX keeps the first directory that it has used."""
    return make_jax_cache(tmp_path_factory)


@pytest.fixture(scope="session")
def session_backend(spelled: Path, jax_cache: Path) -> Iterator[JaxBackend]:
    """A backend of the tiny Qwen3 for several files: each of its programs takes seconds to trace and compile."""
    backend = make_backend(spelled, jax_cache, decode_slots=4)
    yield backend
    backend.close()


@pytest.fixture
def quick_compilation(monkeypatch: pytest.MonkeyPatch) -> None:
    compile_quickly(monkeypatch)


@pytest.fixture
def tiny_backend(session_backend: JaxBackend, quick_compilation: None) -> Iterator[JaxBackend]:
    """The shared backend. Models that the test creates are unloaded after it."""
    before = set(session_backend.models)
    yield session_backend
    for model_id in set(session_backend.models) - before:
        session_backend.unload_model(model_id)


@pytest.fixture(scope="session")
def contract_backend(contract_model: Path, jax_cache: Path) -> Iterator[JaxBackend]:
    """A backend with few programs for several files; the tests unload what they create."""
    backend = make_backend(contract_model, jax_cache, **FEW_PROGRAMS)
    yield backend
    backend.close()


@pytest.fixture(scope="module")
def shipped_compilation() -> Iterator[None]:
    with as_shipped():
        yield
