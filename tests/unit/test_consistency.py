"""The comparison behind the consistency gate on synthetic scores: noisy kernels, small adapters, every fault."""

import numpy as np
import pytest

from tinsmith.engine.probes import FLOAT32, LOW_PRECISION, Bounds, Scores, ScoresN, compare
from tinsmith.operations import Consistency

NUM_TOKENS = 94


class World:
    """A base model, an adapter's effect on it, and two sides with different rounding. Deterministic for a seed."""

    def __init__(self, seed: int, *, noise: float, effect: float) -> None:
        self._rng = np.random.default_rng(seed)
        self._noise = noise
        self.base_N = self._rng.normal(-6, 2, NUM_TOKENS)
        self.base = self.scores(self.base_N)
        self.effect_N = self.draw(effect)

    def draw(self, size: float) -> ScoresN:
        return size * self._rng.normal(size=NUM_TOKENS)

    def rounded(self, true_N: ScoresN) -> ScoresN:
        return true_N + self.draw(self._noise / np.sqrt(2))

    def scores(self, trainer_N: ScoresN, sampler_N: ScoresN | None = None) -> Scores:
        return Scores(
            trainer_N=self.rounded(trainer_N), sampler_N=self.rounded(trainer_N if sampler_N is None else sampler_N)
        )

    def judge(self, served_N: ScoresN, *, last: Scores | None = None, bounds: Bounds) -> Consistency:
        """`served_N` is the effect of what the sampler serves."""
        now = self.scores(self.base_N + self.effect_N, self.base_N + served_N)
        return compare(now, base=self.base, last=last, bounds=bounds)


@pytest.mark.parametrize(("bounds", "noise"), [(FLOAT32, 1e-6), (FLOAT32, 1e-4), (LOW_PRECISION, 2e-2)])
@pytest.mark.parametrize("effect", [0.0, 0.3, 1.0, 4.0, 30.0, 1000.0])
def test_rounding_is_not_taken_for_a_fault(bounds: Bounds, noise: float, effect: float) -> None:
    """A hundred saves in a row, each after a small change. `effect` is in units of the noise."""
    for seed in range(100):
        world = World(seed, noise=noise, effect=effect * noise)
        last = world.scores(world.base_N + world.effect_N + world.draw(0.5 * effect * noise))
        found = world.judge(world.effect_N, last=last, bounds=bounds)
        assert found.verdict == "consistent", (seed, found)


@pytest.mark.parametrize(("bounds", "noise"), [(FLOAT32, 1e-6), (FLOAT32, 1e-4), (LOW_PRECISION, 2e-2)])
@pytest.mark.parametrize("effect", [10.0, 100.0])
@pytest.mark.parametrize("fault", ["ignored", "doubled", "halved", "swapped", "a third is missing"])
def test_faults_of_small_adapters_are_found(bounds: Bounds, noise: float, effect: float, fault: str) -> None:
    """All of them are far below the largest allowed difference."""
    for seed in range(30):
        world = World(seed, noise=noise, effect=effect * noise)
        served = {
            "ignored": 0.0 * world.effect_N,
            "doubled": 2.0 * world.effect_N,
            "halved": 0.5 * world.effect_N,
            "swapped": world.draw(effect * noise),
            "a third is missing": world.effect_N * (2 / 3),
        }[fault]
        found = world.judge(served, bounds=bounds)
        assert found.verdict == "inconsistent", (seed, found)


def test_a_stale_adapter_is_found_by_what_changed_since_the_last_save() -> None:
    """The change is a hundredth of the adapter's whole effect."""
    for seed in range(30):
        world = World(seed, noise=1e-3, effect=1.0)
        before_N = world.effect_N + world.draw(1e-2)
        last = world.scores(world.base_N + before_N)
        found = world.judge(before_N, last=last, bounds=LOW_PRECISION)
        assert found.verdict == "inconsistent", (seed, found)
        assert "change since the last save" in str(found.reason)


def test_the_largest_difference_is_bounded_whatever_the_effect() -> None:
    world = World(0, noise=1e-6, effect=50.0)
    served_N = world.effect_N.copy()
    served_N[7] += 0.011
    found = world.judge(served_N, bounds=FLOAT32)
    assert found.verdict == "inconsistent"
    assert found.max_difference == pytest.approx(0.011, abs=1e-5)
    assert "the largest difference is 0.011, but at most 0.01 is allowed" in str(found.reason)


def test_another_base_model_is_said_to_be_one() -> None:
    world = World(0, noise=1e-6, effect=0.1)
    world.base = world.scores(world.base_N, world.base_N + 1.0)
    found = world.judge(world.effect_N + 1.0, bounds=FLOAT32)
    assert "hold different base models" in str(found.reason)


def test_not_a_number_is_a_fault() -> None:
    world = World(0, noise=1e-6, effect=0.1)
    found = world.judge(world.effect_N * np.nan, bounds=FLOAT32)
    assert found.verdict == "inconsistent"


def test_without_the_trainers_base_scores_the_noise_is_assumed() -> None:
    world = World(0, noise=1e-6, effect=1e-3)
    world.base = Scores(trainer_N=None, sampler_N=world.base.sampler_N)
    assert world.judge(world.effect_N, bounds=FLOAT32).verdict == "consistent"
    found = world.judge(0.0 * world.effect_N, bounds=FLOAT32)
    assert found.verdict == "inconsistent"
    assert found.base_difference is None


def test_what_the_adapter_does_not_explain_must_be_rounding() -> None:
    """A disturbance at right angles to the adapter's effect: the sampler follows the trainer and is still wrong."""
    for seed in range(30):
        world = World(seed, noise=1e-6, effect=1e-3)
        aside_N = world.draw(1e-4)
        aside_N -= world.effect_N * (aside_N @ world.effect_N) / (world.effect_N @ world.effect_N)
        found = world.judge(world.effect_N + aside_N, bounds=FLOAT32)
        assert found.verdict == "inconsistent", (seed, found)
        assert "exceeds what rounding explains" in str(found.reason)
