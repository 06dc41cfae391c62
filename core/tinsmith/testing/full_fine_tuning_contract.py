"""The contract of full fine-tuning: the backend trains all weights of models with LoRA rank 0.

Subclass `FullFineTuningContract` and give it a `backend` fixture, as for `TrainingBackendContract`, with room for six
such models at a time, and a `model_path` fixture if the backend reads a directory.
"""

from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import pytest

from tinsmith.backend import ModelState
from tinsmith.checkpoints.saved import read_checkpoint, read_snapshot, write_checkpoint
from tinsmith.operations import AdamParams, Array, ForwardBackward, OptimStep
from tinsmith.store import CheckpointKind
from tinsmith.testing.abuse_full import FullAbuseContract
from tinsmith.testing.contract import assert_same_arrays, assert_same_numbers, assert_same_state, need
from tinsmith.testing.model_driver import ModelDriver, logprobs_of, ragged_data, succeeded
from tinsmith.testing.training_divergence import TrainingDivergenceContract
from tinsmith.testing.training_numerics import NumericsContract
from tinsmith.testing.training_optimizer import OptimizerContract
from tinsmith.testing.training_routing import RoutingReplayContract
from tinsmith.testing.training_state import StateContract
from tinsmith_checkpoints.huggingface.safetensors_files import StoredTensors

_ONE_OP, _A_MODEL = 1e-5, 1e-4  # allowed float32 difference: after one operation, after a pass through a model
_SHARD_BYTES = 3000  # small enough that even a toy model needs several files
_COMPANY_STEPS = 5


class FullFineTuningContract(
    NumericsContract,
    OptimizerContract,
    TrainingDivergenceContract,
    StateContract,
    RoutingReplayContract,
    FullAbuseContract,
):
    """Numerics, optimizer, state, routing replay as for every model, and tests that only concern models of rank 0."""

    @pytest.fixture
    def model_path(self) -> Path | None:
        """Override to have weights compared with the files, and exports loaded: the backend's Hugging Face model."""
        return None

    def test_fresh_model_has_the_base_weights_and_no_history(
        self, driver: ModelDriver, model_path: Path | None
    ) -> None:
        state = driver.state(driver.create(seed=1))
        assert (state.step, state.adam_m, state.adam_v, state.gradients) == (0, {}, {}, {})
        assert all(array.dtype == np.float32 for array in state.weights.values())
        assert_same_arrays(driver.state(driver.create(seed=2)).weights, state.weights, "models of two seeds")
        if model_path is not None:
            assert_same_arrays(state.weights, StoredTensors.of(model_path, "model"), "a fresh model against the files")

    def test_fresh_model_computes_what_the_base_computes(self, driver: ModelDriver, adapters: ModelDriver) -> None:
        data = ragged_data(80, driver.capabilities.vocab_size)
        full, fresh = (logprobs_of(each.forward(each.create(), data)) for each in (driver, adapters))
        for left, right in zip(full, fresh, strict=True):
            np.testing.assert_allclose(left, right, rtol=0, atol=_ONE_OP)

    def test_company_makes_no_difference(self, driver: ModelDriver, adapters: ModelDriver) -> None:
        """A fully trained model and LoRA models train in the same calls as if each were alone."""
        need(driver.capabilities.isolation != "none", "isolation")
        full, lora = driver.create(), adapters.create_trained(seed=1)
        alone = [_train(driver, [model_id])[0] for model_id in (full, lora)]
        driver.unload_all()
        adapters.unload_all()
        models = [driver.create(), adapters.create_trained(seed=1)]
        for actual, expected in zip(_train(driver, models), alone, strict=True):
            for what in ("weights", "adam_m", "adam_v"):
                arrays: Mapping[str, Array] = getattr(expected, what)
                for name, array in arrays.items():
                    found = getattr(actual, what)[name]
                    assert_same_numbers(driver.capabilities, found, array, f"{what} {name}")

    def test_base_stays_as_it_was(self, driver: ModelDriver, adapters: ModelDriver) -> None:
        """Training leaves unchanged the base that adapters use and from which the next model of rank 0 starts."""
        data = ragged_data(81, driver.capabilities.vocab_size)
        lora = adapters.create_trained()
        before, fresh = logprobs_of(adapters.forward(lora, data)), driver.state(driver.create())
        model_id = driver.create()
        driver.forward_backward(model_id, data)
        driver.optim_step(model_id, AdamParams(learning_rate=0.1))
        for left, right in zip(logprobs_of(adapters.forward(lora, data)), before, strict=True):
            np.testing.assert_array_equal(left, right)
        assert_same_state(driver.state(driver.create()), fresh, "the next model")

    def test_step_is_seen_after_a_forward(self, driver: ModelDriver) -> None:
        """Weights cached by a pass without gradients must not outlive a step or a restore."""
        data = ragged_data(82, driver.capabilities.vocab_size)
        model_id = driver.create()
        driver.forward_backward(model_id, data)
        start = driver.state(model_id)
        before = logprobs_of(driver.forward(model_id, data))
        driver.optim_step(model_id)
        after = logprobs_of(driver.forward(model_id, data))
        other = driver.create()
        driver.backend.restore_state(other, driver.state(model_id))
        for left, right in zip(after, logprobs_of(driver.forward(other, data)), strict=True):
            np.testing.assert_allclose(left, right, rtol=0, atol=_ONE_OP)
        driver.backend.restore_state(model_id, start)
        again = logprobs_of(driver.forward(model_id, data))
        assert all(np.abs(left - right).max() > _A_MODEL for left, right in zip(before, after, strict=True))
        for left, right in zip(before, again, strict=True):
            np.testing.assert_allclose(left, right, rtol=0, atol=_ONE_OP)

    def test_training_goes_on_from_the_files(self, driver: ModelDriver, tmp_path: Path) -> None:
        """Weights, moments, step and pending gradient are restored from shards, bit for bit."""
        vocab_size = driver.capabilities.vocab_size
        model_id = _trained(driver)
        driver.forward_backward(model_id, ragged_data(86, vocab_size))
        directory = _write(driver.state(model_id), tmp_path, "training")
        assert len(list(directory.glob("model-*.safetensors"))) > 1
        checkpoint = read_checkpoint(tmp_path, "m/weights/x")
        assert_same_state(checkpoint.state, driver.state(model_id), "what the files hold")
        resumed = driver.create(seed=checkpoint.state.lora.seed)
        driver.backend.restore_state(resumed, checkpoint.state)
        need(driver.capabilities.deterministic, "determinism")
        for seed in (87, 88):
            for each in (model_id, resumed):
                driver.optim_step(each, AdamParams(learning_rate=1e-3, weight_decay=0.1, grad_clip_norm=1.0))
                driver.forward_backward(each, ragged_data(seed, vocab_size))
            assert_same_state(driver.state(resumed), driver.state(model_id), f"after the files and data {seed}")

    def test_sampler_checkpoint_is_the_snapshot(self, driver: ModelDriver, tmp_path: Path) -> None:
        model_id = _trained(driver)
        published = driver.backend.publish(model_id, "contract-full")
        _write(ModelState(lora=published.lora, weights=published.adapter_weights()), tmp_path, "sampler")
        read = read_snapshot(tmp_path, "m/weights/x", "contract-full")
        assert read.lora == published.lora
        assert_same_arrays(read.adapter_weights(), driver.state(model_id).weights, "a sampler checkpoint")

    @pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch and its company, not ours
    def test_export_loads_in_transformers(self, driver: ModelDriver, tmp_path: Path, model_path: Path | None) -> None:
        """The checkpoint loads in transformers unchanged, with logprobs equal to ours."""
        if model_path is None:
            pytest.skip("override the fixture 'model_path' to have exports loaded in transformers")
        torch = pytest.importorskip("torch")
        transformers = pytest.importorskip("transformers")
        model_id = _trained(driver)
        directory = _write(driver.state(model_id), tmp_path, "external", model_path)
        model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
        data = ragged_data(89, driver.capabilities.vocab_size)
        for datum, logp in zip(data, logprobs_of(driver.forward(model_id, data)), strict=True):
            with torch.no_grad():
                logits = model(torch.tensor(datum.tokens_T[None].astype(np.int64))).logits[0].float()
            targets = torch.tensor(datum.loss_inputs["target_tokens"])
            expected = torch.log_softmax(logits, dim=-1).gather(-1, targets[:, None])[:, 0].numpy()
            np.testing.assert_allclose(logp, expected, rtol=0, atol=_A_MODEL)


def _train(driver: ModelDriver, models: list[str]) -> list[ModelState]:
    """Train a few steps in shared calls. Each model's data depend only on the model itself."""
    for step in range(_COMPANY_STEPS):
        lengths = {model_id: (3, 17) if driver.state(model_id).lora.rank else (9, 30) for model_id in models}
        ops = [
            ForwardBackward(
                model_id=model_id, data=tuple(ragged_data(90 + step, driver.capabilities.vocab_size, lengths[model_id]))
            )
            for model_id in models
        ]
        succeeded(driver.backend.forward_backward(ops))
        driver.backend.optim_step([OptimStep(model_id=m, adam=AdamParams(learning_rate=1e-2)) for m in models])
    return [driver.state(model_id) for model_id in models]


def _trained(driver: ModelDriver) -> str:
    model_id = driver.create(seed=14)
    driver.forward_backward(model_id, ragged_data(85, driver.capabilities.vocab_size))
    driver.optim_step(model_id)
    return model_id


def _write(state: ModelState, root: Path, kind: CheckpointKind, model_path: Path | None = None) -> Path:
    write_checkpoint(
        root,
        "m/weights/x",
        kind=kind,
        state=state,
        base_model="contract",
        user_metadata={},
        created_at=datetime.now(UTC),
        overwrite=False,
        model_path=model_path,
        shard_bytes=_SHARD_BYTES,
    )
    return root / "m/weights/x"
