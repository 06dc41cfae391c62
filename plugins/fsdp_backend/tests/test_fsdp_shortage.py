"""A pass for which a rank has no memory is dropped by all ranks, and run again in halves.

The allocator of one rank is limited, by bytes or at one of its allocations: see limited_rank.py.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fsdp_harness import VOCAB, limited_backend
from limited_rank import LimitedRank

from tinsmith import Datum, OutOfMemoryError
from tinsmith.testing import ModelDriver, assert_same_state, ragged_data
from tinsmith_fsdp.backend import FsdpBackend

pytestmark = pytest.mark.slow

DATA = ragged_data(1, VOCAB, (40, 30, 20, 10))
FORMS = {
    "one rank": {"nproc_per_node": 1},
    "strict": {"nproc_per_node": 2},
    "whole": {"nproc_per_node": 2, "shard_size": 1},
    "replicas": {"nproc_per_node": 4, "shard_size": 2},
    "fast": {"nproc_per_node": 2, "isolation": "fast", "activation_checkpointing": True},
    "kept layers": {"nproc_per_node": 2, "isolation": "fast", "reshard_after_forward": False},
}
RARE = ("kept layers", "replicas", "whole")


@pytest.fixture(
    scope="module",
    params=[pytest.param(form, marks=pytest.mark.thorough if form in RARE else ()) for form in FORMS],
)
def backend(
    request: pytest.FixtureRequest, fsdp_models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[FsdpBackend]:
    backend = limited_backend(fsdp_models["qwen3"], tmp_path_factory.mktemp("cache"), **FORMS[request.param])
    yield backend
    backend.close()


def data_of(backend: FsdpBackend) -> list[Datum]:
    """Return several sequences for each rank."""
    return [*DATA, *DATA] if len(backend.ranks) > 2 else list(DATA)


@contextmanager
def limited(backend: FsdpBackend, rank: int, **limits: int) -> Iterator[list[int]]:
    """Limit one rank. Yields how many micro-batches each attempt at a pass has. Undoes the halving at the end."""
    runs: list[int] = []
    asked, usual = backend.ranks.call_each, backend.rank_tokens

    def call_each(method: Any, arguments: Sequence[tuple[Any, ...]]) -> list[Any]:
        runs.append(len(arguments[0][0]))
        return asked(method, arguments)

    set_limits(backend, {})
    set_limits(backend, {rank: limits})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(backend.ranks, "call_each", call_each)
        yield runs
    set_limits(backend, {})
    backend.rank_tokens = usual


def set_limits(backend: FsdpBackend, limits: dict[int, dict[str, int]]) -> None:
    number = len(backend.ranks)
    own = [limits.get(rank, {}) for rank in range(number)]
    backend.ranks.call_each(LimitedRank.limit, [(each.get("room"), each.get("fails_at")) for each in own])


def counted(
    backend: FsdpBackend, model_id: str, data: Sequence[Datum], *, tokens: int | None = None
) -> tuple[int, int]:
    """Return the allocations of a pass with so many tokens in a micro-batch, and its peak, on the last rank."""
    with limited(backend, 0):
        backend.rank_tokens = tokens or backend.rank_tokens
        ModelDriver(backend).forward_backward(model_id, data)
        return backend.ranks.call(LimitedRank.counted)[-1]


def assert_close(found: Any, expected: Any, backend: FsdpBackend) -> None:
    """With fast isolation, sums are in another order."""
    for name, array in expected.items():
        tolerance = 0.0 if backend.trainer_capabilities.isolation == "bitwise" else 1e-5 * np.abs(array).max()
        np.testing.assert_allclose(found[name], array, rtol=0, atol=tolerance)


@pytest.mark.parametrize("points", [4, pytest.param(400, marks=pytest.mark.thorough)])
def test_a_pass_may_fail_anywhere_on_a_rank(backend: FsdpBackend, points: int) -> None:
    """The others used to wait for ever, or all ended."""
    driver, pids, last = ModelDriver(backend), backend.ranks.pids, len(backend.ranks) - 1
    model_id, data = driver.create_trained(rank=3, seed=1), data_of(backend)
    expected = driver.gradient(model_id, data)
    allocations, _ = counted(backend, model_id, data)
    assert allocations > 100
    for point in sorted({1 + number * (allocations - 1) // (points - 1) for number in range(points)}):
        with limited(backend, last, fails_at=point) as runs:
            found = driver.gradient(model_id, data)
        assert len(runs) == 2, f"allocation {point}: {runs}"
        assert runs[0] < runs[1]
        assert_close(found, expected, backend)
    assert backend.ranks.pids == pids
    driver.unload_all()


def test_a_micro_batch_that_does_not_fit_is_halved_until_the_end(backend: FsdpBackend) -> None:
    driver, pids, last = ModelDriver(backend), backend.ranks.pids, len(backend.ranks) - 1
    model_id, data = driver.create_trained(rank=3, seed=2), data_of(backend)
    expected = driver.gradient(model_id, data)
    _, whole = counted(backend, model_id, data)
    _, half = counted(backend, model_id, data, tokens=25 * len(data) // (last + 1) // 2)
    assert half < whole
    with limited(backend, last, room=(half + whole) // 2) as runs:
        found = driver.gradient(model_id, data)
        assert len(runs) > 1
        runs.clear()
        assert_close(driver.gradient(model_id, data), found, backend)
        assert len(runs) == 1  # nothing fails twice
    assert_close(found, expected, backend)
    assert backend.ranks.pids == pids
    driver.unload_all()


def test_a_sequence_that_does_not_fit_fails_and_changes_nothing(backend: FsdpBackend) -> None:
    driver, pids, number = ModelDriver(backend), backend.ranks.pids, len(backend.ranks)
    failing, beside = (driver.create_trained(rank=3, seed=3) for _ in "ab")
    small, long = ragged_data(2, VOCAB, (4, 3)), ragged_data(3, VOCAB, (*[3] * max(1, number - 1), 128, 2))
    for model_id in (failing, beside):
        driver.forward_backward(model_id, small)
    _, peak = counted(backend, beside, ragged_data(3, VOCAB, (60,) * number))
    driver.backend.restore_state(beside, driver.state(failing))
    told = rf"rank {number - 1} of {number} has no memory for a sequence of 128 tokens; send shorter ones, or "
    with limited(backend, number - 1, room=peak), pytest.raises(OutOfMemoryError, match=told):
        driver.forward_backward(failing, long)
    assert_same_state(driver.state(failing), driver.state(beside), "what failed has added nothing")
    for model_id in (failing, beside):
        driver.forward_backward(model_id, small)
        driver.optim_step(model_id)
    assert_same_state(driver.state(failing), driver.state(beside), "both go on")
    assert backend.ranks.pids == pids
    driver.unload_all()
