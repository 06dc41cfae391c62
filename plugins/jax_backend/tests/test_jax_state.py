"""Snapshots, captured states, canonical names, refusals and capabilities of the jax backend."""

import json
import pickle
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
import torch
from jax_harness import LOSSES, add_model, assert_same_bits, assert_same_state, make_backend, make_op, train
from safetensors.numpy import save_file
from transformers import AutoModelForCausalLM

from tinsmith import (
    AdamParams,
    CapacityError,
    CreateModel,
    Forward,
    LoraConfig,
    ModelState,
    OptimStep,
    UserError,
)
from tinsmith_jax.backend import JaxBackend

pytestmark = pytest.mark.usefixtures("quick_compilation")

ADAM = AdamParams(learning_rate=1e-2)
LORA = LoraConfig(rank=4, seed=1)
# Here and below data of three or four tiles, so that one program trains on all of them, also in test_jax_parity.py.
LENGTHS = (40, 70)


@pytest.fixture
def backend(tiny_backend: JaxBackend) -> JaxBackend:
    return tiny_backend


def test_a_snapshot_never_changes(backend: JaxBackend) -> None:
    add_model(backend, "m", LORA)
    train(backend, make_op("m", 0, LENGTHS), ADAM)
    snapshot = backend.publish("m", "s1")
    taken = {name: value.copy() for name, value in snapshot.adapter_weights().items()}
    assert_same_bits(taken, backend.capture_state("m").weights)
    for step in range(3):
        train(backend, make_op("m", step, LENGTHS), ADAM)
    assert snapshot.snapshot_id == "s1"
    assert_same_bits(snapshot.adapter_weights(), taken)
    backend.unload_model("m")
    assert_same_bits(snapshot.adapter_weights(), taken)


def test_publishing_changes_no_training(backend: JaxBackend) -> None:
    add_model(backend, "m", LORA)
    plain = [train(backend, make_op("m", step, LENGTHS), ADAM)[0] for step in range(3)]
    backend.unload_model("m")
    add_model(backend, "m", LORA)
    published = []
    for step in range(3):
        backend.publish("m", f"s{step}")
        published.append(train(backend, make_op("m", step, LENGTHS), ADAM)[0])
    assert published == plain


def test_a_state_comes_back_bit_for_bit(backend: JaxBackend) -> None:
    """Into another model, pending gradients included; both then go on alike."""
    lora = LoraConfig(rank=5, seed=1, train_mlp=False)
    add_model(backend, "m", lora)
    train(backend, make_op("m", 0, (40, 70)), ADAM)
    backend.forward_backward([make_op("m", 1, (33, 80))])
    state = backend.capture_state("m")
    assert state.gradients
    assert state.step == 1
    add_model(backend, "n", LoraConfig(rank=5, seed=99, train_mlp=False))
    backend.restore_state("n", state)
    assert_same_state(backend.capture_state("n"), state)
    for step in range(2):
        ours, theirs = (train(backend, make_op(name, 2 + step, (50, 3, 9)), ADAM) for name in ("m", "n"))
        assert ours[0] == theirs[0]
    assert_same_state(backend.capture_state("n"), backend.capture_state("m"))


def test_a_captured_state_is_a_copy(backend: JaxBackend) -> None:
    add_model(backend, "m", LORA)
    backend.forward_backward([make_op("m", 0, LENGTHS)])
    state = backend.capture_state("m")
    kept = {name: value.copy() for name, value in state.weights.items()}
    backend.optim_step([OptimStep(model_id="m", adam=ADAM)])
    assert_same_bits(state.weights, kept)


def test_a_captured_state_has_no_padding_and_is_put_into_form_by_its_reader(backend: JaxBackend) -> None:
    """It crosses processes as it is, and says what it takes of memory: as it is, and in canonical form."""
    add_model(backend, "m", LoraConfig(rank=3, seed=1, train_mlp=False))
    train(backend, make_op("m", 0, LENGTHS), ADAM)
    state = backend.capture_state("m")
    arrays = sum(array.nbytes for array in state.weights.values())
    assert state.weights_bytes == 2 * arrays
    assert state.memory_bytes == 3 * 2 * arrays
    buffers: list[pickle.PickleBuffer] = []
    sent = pickle.dumps(state, protocol=5, buffer_callback=buffers.append)
    assert sum(buffer.raw().nbytes for buffer in buffers) == 3 * arrays
    assert len(sent) < arrays
    assert_same_state(pickle.loads(sent, buffers=buffers), state)
    with pytest.raises(KeyError):
        state.weights["stray"]
    assert "stray" not in state.weights


def test_weights_alone_mean_a_fresh_optimizer(backend: JaxBackend) -> None:
    add_model(backend, "m", LORA)
    train(backend, make_op("m", 0, LENGTHS), ADAM)
    weights = backend.capture_state("m").weights
    backend.restore_state("m", ModelState(lora=LORA, weights=weights))
    restored = backend.capture_state("m")
    assert (restored.step, restored.adam_m, restored.gradients) == (0, {}, {})


@pytest.mark.parametrize("flag", ["train_attn", "train_mlp", "train_unembed"])
def test_what_is_not_trained_is_neither_kept_nor_moved(backend: JaxBackend, flag: str) -> None:
    lora = LoraConfig(rank=3, seed=1, **{flag: False})  # type: ignore[arg-type]
    add_model(backend, "m", lora)
    train(backend, make_op("m", 0, LENGTHS), AdamParams(learning_rate=1e-2, eps=0.0))
    part = {"train_attn": "self_attn", "train_mlp": "mlp", "train_unembed": "lm_head"}[flag]
    state = backend.capture_state("m")
    for names in (state.weights, state.adam_m):
        assert names
        assert not any(part in name for name in names)


def test_initial_weights_come_from_the_seed(backend: JaxBackend) -> None:
    add_model(backend, "m", LORA)
    add_model(backend, "n", LORA)
    one = backend.capture_state("m").weights
    assert_same_bits(one, backend.capture_state("n").weights)
    A = one["base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"]
    assert A.shape == (4, 64)
    assert 0.9 / 8 < np.abs(A).max() <= 1 / 8
    assert not np.any(one["base_model.model.model.layers.0.self_attn.q_proj.lora_B.weight"])
    backend.unload_model("n")
    add_model(backend, "n", LoraConfig(rank=4, seed=2))
    name = "base_model.model.lm_head.lora_A.weight"
    assert not np.array_equal(one[name], backend.capture_state("n").weights[name])


@pytest.mark.parametrize("kind", ["qwen3", "llama3"])
def test_peft_loads_the_canonical_names(
    tiny_models: Mapping[str, Path], jax_cache: Path, tiny_backend: JaxBackend, tmp_path: Path, kind: str
) -> None:
    from peft import LoraConfig as PeftConfig  # here: it takes longer to import than all tests take to collect
    from peft import PeftModel, get_peft_model

    backend = tiny_backend if kind == "qwen3" else make_backend(tiny_models[kind], jax_cache)
    lora = LoraConfig(rank=4, seed=1, train_unembed=kind != "qwen3")  # peft merges no head into a tied embedding
    add_model(backend, "m", lora, random_B=True)
    op = make_op("m", 0, (9, 70))
    (output,) = backend.forward([Forward(model_id="m", data=op.data)])
    weights = dict(backend.capture_state("m").weights)
    modules = sorted({name.split(".lora_")[0].rsplit(".", 1)[1] for name in weights})
    config = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": 4, "lora_alpha": 32, "target_modules": modules}
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    save_file(weights, tmp_path / "adapter_model.safetensors")
    model = AutoModelForCausalLM.from_pretrained(tiny_models[kind], dtype=torch.float32)
    expected = get_peft_model(model, PeftConfig(r=4, lora_alpha=32, target_modules=modules, task_type="CAUSAL_LM"))
    assert len([name for name in expected.state_dict() if "lora_" in name]) == len(weights)
    base = AutoModelForCausalLM.from_pretrained(tiny_models[kind], dtype=torch.float32)
    loaded = PeftModel.from_pretrained(base, str(tmp_path))
    for datum, ours in zip(op.data, output.loss_fn_outputs, strict=True):
        with torch.no_grad():
            logits = loaded(torch.tensor(np.asarray(datum.tokens_T))[None]).logits[0]
        theirs = torch.log_softmax(logits, -1).gather(-1, torch.tensor(datum.targets_TK))[:, 0].numpy()
        np.testing.assert_allclose(ours["logprobs"], theirs, rtol=0, atol=1e-4)


def test_model_methods_raise_user_errors(tiny_models: Mapping[str, Path], jax_cache: Path) -> None:
    backend = make_backend(tiny_models["qwen3"], jax_cache, max_models=2)
    add_model(backend, "m", LORA)
    add_model(backend, "n", LORA)
    with pytest.raises(CapacityError, match="all 2 models are in use"):
        backend.create_model(CreateModel(model_id="o", lora=LORA))
    state = backend.capture_state("m")
    short = dict(state.weights)
    name = short.popitem()[0]
    with pytest.raises(UserError, match=f"'{name}' is missing"):
        backend.restore_state("m", ModelState(lora=LORA, weights=short))
    with pytest.raises(UserError, match="'stray' and 0 more"):
        backend.restore_state("m", ModelState(lora=LORA, weights={**state.weights, "stray": state.weights[name]}))
    with pytest.raises(UserError, match="has shape"):
        backend.restore_state("m", ModelState(lora=LORA, weights={**state.weights, name: np.zeros((1, 1))}))
    assert_same_state(backend.capture_state("m"), state)


def test_capabilities(backend: JaxBackend) -> None:
    capabilities = backend.trainer_capabilities
    assert capabilities.vocab_size == 160
    assert (capabilities.max_context_tokens, capabilities.max_batch_tokens) == (320, 512)
    assert capabilities.losses == frozenset(LOSSES)
    assert (capabilities.isolation, capabilities.deterministic) == ("bitwise", True)
    assert capabilities.max_targets_per_token == backend.sampler_capabilities.max_topk_logprobs == 128


@pytest.mark.thorough
@pytest.mark.slow
def test_bfloat16_keeps_float32_where_it_matters(tiny_models: Mapping[str, Path], jax_cache: Path) -> None:
    exact = make_backend(tiny_models["llama3"], jax_cache)
    rough = make_backend(tiny_models["llama3"], jax_cache, dtype="bfloat16")
    assert rough.trainer_capabilities.isolation == ("bitwise" if rough.limits.native else "close")
    outputs = []
    for backend in (exact, rough):
        add_model(backend, "m", LORA, random_B=True)
        outputs.append(backend.forward_backward([make_op("m", 0, (40, 70))])[0])
        backend.optim_step([OptimStep(model_id="m", adam=ADAM)])
        state = backend.capture_state("m")
        for part in (state.weights, state.adam_m, state.adam_v):
            assert {value.dtype for value in part.values()} == {np.dtype(np.float32)}
    for ours, theirs in zip(outputs[0].loss_fn_outputs, outputs[1].loss_fn_outputs, strict=True):
        assert theirs["logprobs"].dtype == np.float32
        assert np.abs(ours["logprobs"] - theirs["logprobs"]).mean() < 0.1
