"""The comparison behind the consistency gate, on plain arrays: does the sampler score what the trainer scores?

All scores are log-probabilities in nats of the same probe tokens. Besides the difference itself, the comparison looks
at how the scores moved: from the base model to the adapter, and since the model's last save. The scores of a sampler
that serves something else move differently from the trainer's. This shows even for a small adapter, as long as its
effect exceeds the numerical difference that the two already have on the base model.

Array suffix: N = scored probe tokens.
"""

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from tinsmith.operations import Consistency

ScoresN = npt.NDArray[np.float64]

_STANDS_OUT = 3.0  # times the noise: from here on the direction of a movement can be trusted
_NOISE = 4.0  # times the noise on the base model: allowed with an adapter
_FOLLOWED = 0.25  # the share of the adapter's effect that the sampler shows may differ from 1 by this much
_FOLLOWED_SINCE = 0.5  # the same for the movement since the last save, which is smaller


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """What is tolerated. Noise is a root mean square; `unmeasured_noise` stands in if it could not be measured."""

    max_difference: float
    share_of_effect: float  # of the adapter's own effect, for rounding in the sampler's kernels
    least_noise: float
    unmeasured_noise: float


FLOAT32 = Bounds(max_difference=0.01, share_of_effect=0.02, least_noise=2e-6, unmeasured_noise=1e-5)
LOW_PRECISION = Bounds(max_difference=1.0, share_of_effect=0.1, least_noise=2e-3, unmeasured_noise=2e-2)


@dataclass(frozen=True, slots=True, kw_only=True)
class Scores:
    """The scores of one set of weights by both sides. `trainer_N` is None if the trainer could not score it."""

    trainer_N: ScoresN | None
    sampler_N: ScoresN


def compare(now: Scores, *, base: Scores, last: Scores | None, bounds: Bounds) -> Consistency:
    """Judge a snapshot. `base` scores the base model, `last` the model's last consistent save."""
    trainer_N, sampler_N = now.trainer_N, now.sampler_N
    assert trainer_N is not None
    difference_N = np.abs(sampler_N - trainer_N)
    base_difference_N = None if base.trainer_N is None else np.abs(base.sampler_N - base.trainer_N)
    base_N = base.sampler_N if base.trainer_N is None else base.trainer_N
    effect_N = trainer_N - base_N
    noise = bounds.unmeasured_noise if base_difference_N is None else max(_rms(base_difference_N), bounds.least_noise)
    measured = Consistency(
        verdict="consistent",
        num_tokens=len(difference_N),
        max_difference=float(difference_N.max()),
        mean_difference=float(difference_N.mean()),
        effect=float(np.abs(effect_N).mean()),
        base_difference=None if base_difference_N is None else float(base_difference_N.max()),
    )
    reason = _too_far(measured, bounds)
    if reason is None:
        reason = _does_not_follow(now, Scores(trainer_N=base_N, sampler_N=base.sampler_N), noise, _FOLLOWED, "adapter")
    if reason is None and last is not None:
        reason = _does_not_follow(now, last, noise, _FOLLOWED_SINCE, "change since the last save")
    allowed = _NOISE * noise + bounds.share_of_effect * _rms(effect_N)
    if reason is None and not _rms(difference_N) <= allowed:
        reason = (
            f"the difference (root mean square {_rms(difference_N):.3g}) exceeds what rounding explains "
            f"({allowed:.3g}, given the adapter's own effect of {_rms(effect_N):.3g})"
        )
    if reason is None:
        return measured
    return replace(measured, verdict="inconsistent", reason=reason)


def not_compared(reason: str) -> Consistency:
    """Return the verdict of a save that could not be compared."""
    return Consistency(verdict="not compared", reason=reason)


def _too_far(measured: Consistency, bounds: Bounds) -> str | None:
    largest, on_base = measured.max_difference, measured.base_difference
    assert largest is not None
    if largest <= bounds.max_difference:
        return None  # false for NaN, which is too far
    reason = f"the largest difference is {largest:.3g}, but at most {bounds.max_difference:g} is allowed"
    if on_base is not None and not on_base <= bounds.max_difference:
        reason += f"; without any adapter it is already {on_base:.3g}: trainer and sampler hold different base models"
    return reason


def _does_not_follow(now: Scores, before: Scores, noise: float, tolerance: float, what: str) -> str | None:
    """Measure how far the sampler followed the trainer's movement: 1 is all the way, 0 not at all."""
    assert now.trainer_N is not None
    assert before.trainer_N is not None
    moved_N = now.trainer_N - before.trainer_N
    if not _rms(moved_N) > _STANDS_OUT * noise:
        return None
    followed = float((now.sampler_N - before.sampler_N) @ moved_N / (moved_N @ moved_N))
    if abs(followed - 1.0) <= tolerance:
        return None
    return f"the sampler shows {followed:.2f} of the effect that the {what} has in the trainer; it should be 1"


def _rms(values_N: ScoresN) -> float:
    return float(np.sqrt(np.mean(np.square(values_N))))
