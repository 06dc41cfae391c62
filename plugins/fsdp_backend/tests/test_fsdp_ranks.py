"""The ranks as processes: how many there are changes nothing, none holds the whole model, and a dead one is noticed."""

import os
import signal
import subprocess
import sys
import textwrap
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import numpy as np
import pytest
from fsdp_harness import VOCAB, fork_backend, shape
from fsdp_runs import compare_steps, train_fully, train_three_ranks
from telling_rank import TellingRank

from tinsmith import (
    CapacityError,
    ConfigError,
    CreateModel,
    LoraConfig,
    ModelState,
    UserError,
)
from tinsmith.testing import (
    FullDriver,
    ModelDriver,
    assert_close_arrays,
    assert_same_state,
    ragged_data,
    write_tiny_model,
)
from tinsmith_fsdp.backend import FsdpBackend
from tinsmith_workers import WorkerDiedError
from tinsmith_workers.testing.contract import alive

pytestmark = pytest.mark.slow  # starting ranks takes seconds

WAIT_S = 300.0


@pytest.fixture(scope="module")
def one_rank(fsdp_models: Mapping[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[FsdpBackend]:
    cache, limits = tmp_path_factory.mktemp("cache"), {"max_models": 4, "max_full_models": 2}
    backend = fork_backend(fsdp_models["qwen3"], cache, nproc_per_node=1, **limits)
    yield backend
    backend.close()


def test_one_rank_and_two_compute_the_same_bits(one_rank: FsdpBackend, two_ranks: FsdpBackend) -> None:
    """Asked for are 1e-5; every sequence is computed by itself and added in the log's order, so nothing differs."""
    (logps, losses, states), (more_logps, more_losses, more_states) = map(train_three_ranks, (one_rank, two_ranks))
    for left, right in zip(logps, more_logps, strict=True):
        np.testing.assert_array_equal(left, right)
    assert losses == more_losses
    for one, two in zip(states, more_states, strict=True):
        assert_same_state(two, one, "two ranks against one")


def test_full_fine_tuning_is_the_same_on_one_rank_and_two(one_rank: FsdpBackend, two_ranks: FsdpBackend) -> None:
    """A rank that has no part in a sequence adds exact zeros; only the norm is summed in parts."""
    (logps, numbers, state), (more_logps, more_numbers, more_state) = map(train_fully, (one_rank, two_ranks))
    for left, right in zip(logps, more_logps, strict=True):
        np.testing.assert_allclose(right, left, rtol=0, atol=1e-5)
    np.testing.assert_allclose(more_numbers, numbers, rtol=1e-6)
    for kind in ("weights", "adam_m", "adam_v", "gradients"):
        assert_close_arrays(getattr(more_state, kind), getattr(state, kind), 1e-5, kind)


def test_tensor_parallel_ranks_compute_the_same(
    one_rank: FsdpBackend, fsdp_models: Mapping[str, Path], tmp_path: Path
) -> None:
    backend = fork_backend(fsdp_models["qwen3"], tmp_path, nproc_per_node=2, tensor_parallel=2)
    try:
        for loaded in backend.loaded:
            assert loaded.parameter_bytes < loaded.total_bytes
        for lora in (*(LoraConfig(rank=rank, seed=rank) for rank in (1, 16)), LoraConfig(rank=0, seed=0)):
            compare_steps(one_rank, backend, lora)
    finally:
        backend.close()


def test_each_rank_holds_and_reads_its_share(two_ranks: FsdpBackend) -> None:
    for loaded in two_ranks.loaded:
        assert loaded.meta_only, "the model had memory before it was divided"
        assert loaded.parameter_bytes <= 0.51 * loaded.total_bytes
        assert loaded.read_bytes <= 0.51 * loaded.total_bytes
    assert sum(loaded.parameter_bytes for loaded in two_ranks.loaded) == two_ranks.loaded[0].total_bytes


def test_each_rank_holds_and_reads_its_share_of_a_fully_trained_model(two_ranks: FsdpBackend) -> None:
    driver = FullDriver(two_ranks)
    rows = Counter[str]()
    for loaded, pieces in two_ranks.ranks.call(TellingRank.held, driver.create()):
        assert loaded.meta_only, "the model had memory before it was divided"
        assert loaded.parameter_bytes <= 0.51 * loaded.total_bytes
        assert loaded.read_bytes <= 0.51 * loaded.total_bytes
        rows.update({piece.name: piece.count for piece in pieces})
    assert rows == {piece.name: piece.shape[0] for piece in pieces}, "each row is on one rank"
    driver.unload_all()


def test_full_models_have_a_limit_of_their_own(one_rank: FsdpBackend) -> None:
    driver, adapters = FullDriver(one_rank), ModelDriver(one_rank)
    for _ in range(2):
        driver.create()
    with pytest.raises(CapacityError, match=r"max_full_models is 2; end the session .* or train a LoRA adapter"):
        driver.create()
    adapters.create()
    adapters.unload_all()
    driver.unload_all()


def test_a_foreign_full_state_is_refused_and_changes_nothing(one_rank: FsdpBackend) -> None:
    """Also where it is the last tensor that does not fit."""
    driver = FullDriver(one_rank)
    model_id = driver.create()
    driver.forward_backward(model_id, ragged_data(84, VOCAB, (5,)))
    state = driver.state(model_id)
    *_, last = state.weights
    weights = {name: array + 1 for name, array in state.weights.items()}
    for foreign, message in (
        ({name: array for name, array in weights.items() if name != last}, f"'{last}' and 0 more are missing"),
        ({**weights, "stray": weights[last]}, "'stray' and 0 more do not belong"),
        ({**weights, last: weights[last][:-1]}, f"'{last}' has shape"),
    ):
        with pytest.raises(UserError, match=message):
            one_rank.restore_state(model_id, ModelState(lora=state.lora, weights=foreign))
        assert_same_state(driver.state(model_id), state, "after a refusal")
    driver.unload_all()


def test_refusals_are_user_errors_and_harm_nothing(one_rank: FsdpBackend) -> None:
    driver = ModelDriver(one_rank)
    model_id = driver.create_trained()
    before = driver.state(model_id)
    for _ in range(3):
        driver.create()
    with pytest.raises(CapacityError, match="all 4 models are in use"):
        driver.create()
    name = min(before.weights)
    short = {key: value for key, value in before.weights.items() if key != name}
    for weights, message in (
        (short, "is missing"),
        ({**before.weights, "stray": before.weights[name]}, "'stray' and 0 more"),
        ({**before.weights, name: np.zeros((1, 1), np.float32)}, "has shape"),
    ):
        with pytest.raises(UserError, match=message):
            one_rank.restore_state(model_id, ModelState(lora=before.lora, weights=weights))
    assert_same_state(driver.state(model_id), before, "after refusals")
    driver.unload_all()


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("LlamaForSequenceClassification", "is not supported, only those for text"),
        (
            "Qwen3_5ForConditionalGeneration",
            "and its model_type is another's: llama",
        ),
        ("NobodysForCausalLM", "has no class NobodysForCausalLM"),
    ],
)
def test_a_class_that_cannot_be_trained_is_refused_by_name(name: str, message: str, tmp_path: Path) -> None:
    write_tiny_model(tmp_path / "m", shape("llama"))
    config = (tmp_path / "m" / "config.json").read_text().replace("LlamaForCausalLM", name)
    (tmp_path / "m" / "config.json").write_text(config)
    with pytest.raises(ConfigError, match=message):
        fork_backend(tmp_path / "m", tmp_path, max_full_models=0)


def test_a_dead_rank_ends_the_call_at_once_and_all_ranks(doomed_ranks: FsdpBackend) -> None:
    driver = ModelDriver(doomed_ranks)
    model_id = driver.create()
    pids = doomed_ranks.ranks.pids
    os.kill(pids[1], signal.SIGKILL)
    started = time.monotonic()
    either = r"worker 1 of 2 .* died|worker 0 of 2 .* failed"  # its death is seen first, or what it does to the other
    with pytest.raises(WorkerDiedError, match=either):
        driver.forward_backward(model_id, ragged_data(1, VOCAB))
    assert time.monotonic() - started < WAIT_S
    with pytest.raises(WorkerDiedError, match=either):
        doomed_ranks.create_model(CreateModel(model_id="late", lora=LoraConfig(rank=1, seed=0)))
    doomed_ranks.close()
    wait_until(lambda: not any(map(alive, pids)))


@pytest.mark.thorough  # libraries/workers/tests/test_workers.py does the same without torch
def test_ranks_end_with_a_killed_engine(fsdp_models: Mapping[str, Path], tmp_path: Path) -> None:
    with killed_engine(fsdp_models["qwen3"], tmp_path) as output:
        pids = [int(word) for word in output.readline().split()]
        assert len(pids) == 2
        assert all(map(alive, pids))
    wait_until(lambda: not any(map(alive, pids)))


@contextmanager
def killed_engine(model_path: Path, directory: Path) -> Iterator[IO[str]]:
    """A process with a backend of two ranks, which prints their process ids; it is killed at the end of the block."""
    code = f"""
        import sys, time
        sys.path[:0] = {sys.path!r}
        from pathlib import Path
        from fsdp_harness import make_backend
        backend = make_backend(Path({str(model_path)!r}), Path({str(directory)!r}), nproc_per_node=2)
        print(*backend.ranks.pids, flush=True)
        time.sleep(600)
    """
    with subprocess.Popen([sys.executable, "-c", textwrap.dedent(code)], stdout=subprocess.PIPE, text=True) as engine:
        try:
            assert engine.stdout is not None
            yield engine.stdout
        finally:
            engine.kill()


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline, "ranks are still there"
        time.sleep(0.05)
