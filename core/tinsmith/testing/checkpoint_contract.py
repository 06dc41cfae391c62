"""The contract of a training backend's checkpoints: they restore bit for bit from files, and load in PEFT.

Subclass `CheckpointContract` and give it a `backend` fixture and, for the PEFT test, `model_path`.
"""

from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import pytest

from tinsmith.checkpoints.saved import read_checkpoint, read_snapshot, write_checkpoint
from tinsmith.operations import Datum, FloatArray
from tinsmith.store import CheckpointKind
from tinsmith.testing.contract import assert_same_arrays, assert_same_state, need
from tinsmith.testing.model_driver import ModelDriver, logprobs_of, ragged_data
from tinsmith.testing.training_suite import TrainingSuite

_A_MODEL = 1e-4  # allowed float32 difference after a pass through a model


class CheckpointContract(TrainingSuite):
    @pytest.fixture
    def model_path(self) -> Path | None:
        """Override to test exports in PEFT: the Hugging Face directory of the backend's base model."""
        return None

    def test_training_goes_on_from_the_file(self, driver: ModelDriver, tmp_path: Path) -> None:
        model_id = _trained(driver)
        driver.forward_backward(model_id, ragged_data(101, driver.capabilities.vocab_size))
        _write(driver, model_id, tmp_path, "training")
        checkpoint = read_checkpoint(tmp_path, "m/weights/x")
        assert_same_state(checkpoint.state, driver.state(model_id), "what the file holds")
        lora = checkpoint.state.lora
        resumed = driver.create(rank=lora.rank, seed=lora.seed)
        driver.backend.restore_state(resumed, checkpoint.state)
        need(driver.capabilities.deterministic, "determinism")
        for each in (model_id, resumed):
            driver.optim_step(each)
            driver.forward_backward(each, ragged_data(102, driver.capabilities.vocab_size))
        assert_same_state(driver.state(resumed), driver.state(model_id), "a step after the file")

    def test_sampler_checkpoint_is_the_snapshot(self, driver: ModelDriver, tmp_path: Path) -> None:
        model_id = _trained(driver)
        published = driver.backend.publish(model_id, "contract-checkpoint")
        _write(driver, model_id, tmp_path, "sampler")
        read = read_snapshot(tmp_path, "m/weights/x", "contract-checkpoint")
        assert read.lora == published.lora
        assert_same_arrays(read.adapter_weights(), published.adapter_weights(), "a sampler checkpoint")

    @pytest.mark.filterwarnings("ignore::UserWarning:peft")  # PEFT warns of adapters on tied heads
    @pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch and its company, not ours
    def test_export_loads_in_peft(self, driver: ModelDriver, tmp_path: Path, model_path: Path | None) -> None:
        """PEFT uses every tensor, and its logprobs equal ours."""
        if model_path is None:
            pytest.skip("override the fixture 'model_path' to have exports loaded in PEFT")
        model_id = _trained(driver)
        _write(driver, model_id, tmp_path, "external")
        data = ragged_data(103, driver.capabilities.vocab_size)
        expected = logprobs_of(driver.forward(model_id, data))
        weights = driver.state(model_id).weights
        actual, names = _peft_logprobs(model_path, tmp_path / "m/weights/x", data)
        assert names == set(weights), "PEFT must make a module for every tensor, and no other"
        for left, right in zip(actual, expected, strict=True):
            np.testing.assert_allclose(left, right, rtol=0, atol=_A_MODEL)


def _trained(driver: ModelDriver) -> str:
    model_id = driver.create_trained(rank=4, seed=14)
    driver.forward_backward(model_id, ragged_data(100, driver.capabilities.vocab_size))
    driver.optim_step(model_id)
    return model_id


def _write(driver: ModelDriver, model_id: str, root: Path, kind: CheckpointKind) -> None:
    write_checkpoint(
        root,
        "m/weights/x",
        kind=kind,
        state=driver.state(model_id),
        base_model="contract",
        user_metadata={},
        created_at=datetime.now(UTC),
        overwrite=False,
    )


def _peft_logprobs(model_path: Path, adapter: Path, data: list[Datum]) -> tuple[list[FloatArray], set[str]]:
    """Return the logprobs of the targets by transformers and PEFT, and the names of the tensors PEFT loaded."""
    torch = pytest.importorskip("torch")
    peft = pytest.importorskip("peft")
    transformers = pytest.importorskip("transformers")
    base = transformers.AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32)
    model = peft.PeftModel.from_pretrained(base, adapter).eval()
    names = {name.replace(".default", "") for name, _ in model.named_parameters() if ".lora_" in name}
    result = []
    for datum in data:
        with torch.no_grad():
            logits = model(torch.tensor(datum.tokens_T[None].astype(np.int64))).logits[0].float()
        targets = torch.tensor(datum.loss_inputs["target_tokens"])
        result.append(torch.log_softmax(logits, dim=-1).gather(-1, targets[:, None])[:, 0].numpy())
    return result, names
