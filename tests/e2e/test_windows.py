"""Steps that are refused, through the unmodified SDK: what a script sees that sends all without waiting."""

import re
from collections.abc import Sequence

import numpy as np
import pytest
import tinker
from chunks import in_chunks_of

from tinsmith.testing.sdk_data import TOKENS, datum, ragged, rl_datum, step

ADAM = tinker.AdamParams(learning_rate=0.01)
BAD = tinker.Datum(  # a token outside of the vocabulary
    model_input=tinker.ModelInput.from_ints([1, 999]),
    loss_fn_inputs={"target_tokens": np.array([1, 2]), "weights": np.ones(2, np.float32)},
)
INFINITE = rl_datum(TOKENS, [-1e4] * (len(TOKENS) - 1), 1.0)  # its ratios of probabilities are


@pytest.fixture
def models(client: tinker.ServiceClient) -> list[tinker.TrainingClient]:
    """Two models that are the same: what happens to the first must not show."""
    return [client.create_lora_training_client(base_model="toy", rank=4, seed=1).result(timeout=300) for _ in range(2)]


def refused(step: tinker.APIFuture[tinker.OptimStepResponse]) -> str:
    with pytest.raises(tinker.RequestFailedError) as failure:
        step.result(timeout=300)
    assert failure.value.category == tinker.types.RequestErrorCategory.User
    return str(failure.value)


def train_alike(models: Sequence[tinker.TrainingClient]) -> None:
    """Step all models, and save them. They must have been the same, and be the same afterwards, bit for bit."""
    for seed in (7, 8):
        outputs = [step(model, ragged(3, seed)) for model in models]
        assert len({output.metrics["loss:sum"] for output in outputs}) == 1
    paths = [model.save_state("after").result(timeout=300).path for model in models]
    assert len(set(paths)) == len(models)


def test_a_script_goes_on_after_a_bad_pass(models: list[tinker.TrainingClient]) -> None:
    """Accumulate, send a bad pass and a step together, see the step refused, go on."""
    model, _ = models
    for each in models:
        step(each, [datum()])
    accumulated = model.forward_backward(ragged(3), "cross_entropy").result(timeout=300)
    assert accumulated.metrics["loss:sum"] > 0
    bad, stepped = model.forward_backward([BAD], "cross_entropy"), model.optim_step(ADAM)
    with pytest.raises(tinker.RequestFailedError, match=r"data\[0\].*token id 999") as failure:
        bad.result(timeout=300)
    assert failure.value.category == tinker.types.RequestErrorCategory.User
    why = refused(stepped)
    assert "discarded" in why
    assert "token id 999" in why
    assert re.search(r"request [\w-]+:", why)
    train_alike(models)


def test_a_failed_chunk_discards_the_step_of_its_batch(models: list[tinker.TrainingClient]) -> None:
    """The SDK has split the batch: its other chunks were good."""
    model, _ = models
    with in_chunks_of(1, model):
        passed, stepped = model.forward_backward([*ragged(2), BAD, *ragged(2)], "cross_entropy"), model.optim_step(ADAM)
        with pytest.raises(tinker.RequestFailedError, match="token id 999"):
            passed.result(timeout=300)
    assert "token id 999" in refused(stepped)
    train_alike(models)


def test_a_gradient_that_is_not_finite_costs_its_window_alone(models: list[tinker.TrainingClient]) -> None:
    model, _ = models
    for each in models:
        step(each, [datum()])
    data = [rl_datum(TOKENS, [-4.0] * 6, 1.0), INFINITE]
    with in_chunks_of(1, model):  # the first one is fine
        passed, stepped = model.forward_backward(data, "importance_sampling"), model.optim_step(ADAM)
        metrics = passed.result(timeout=300).metrics
    assert not np.isfinite(metrics["loss:sum"])
    assert metrics["not_finite:max"] == 1
    assert "the norm of the gradient is" in refused(stepped)
    assert step(models[1], [datum()]).metrics["not_finite:max"] == 0
    step(model, [datum()])
    train_alike(models)


def test_a_failed_forward_discards_nothing(models: list[tinker.TrainingClient]) -> None:
    """Not even one that could not be read, so that no operation came of it."""
    model, twin = models
    image = tinker.ModelInput(chunks=[tinker.types.ImageChunk(data=b"png", format="png", expected_tokens=3)])
    unread = tinker.Datum(model_input=image, loss_fn_inputs=BAD.loss_fn_inputs)
    model.forward_backward(ragged(3), "cross_entropy")
    failed = [model.forward([each], "cross_entropy") for each in (BAD, unread)]
    stepped = model.optim_step(ADAM).result(timeout=300)
    twin.forward_backward(ragged(3), "cross_entropy").result(timeout=300)
    assert stepped.metrics == twin.optim_step(ADAM).result(timeout=300).metrics
    for each in failed:
        with pytest.raises(tinker.RequestFailedError):
            each.result(timeout=300)
    train_alike(models)
