"""Probes: whether a sampler serves what its trainer has trained.

Both score the same few sequences: the trainer in a forward pass, the sampler from the snapshot that clients will sample
from. Nothing here changes a model.

All scores are log-probabilities in nats of the same probe tokens. Besides the difference itself, `compare` looks at how
the scores moved: from the base model to the adapter, and since the model's last save. The scores of a sampler that
serves something else move differently from the trainer's. This shows even for a small adapter, as long as its effect
exceeds the numerical difference that the two already have on the base model.

Array suffix: N = scored probe tokens.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final, TypeVar

import numpy as np
import numpy.typing as npt

from tinsmith import operations as ops
from tinsmith.backend import SamplerCapabilities, SamplingBackend, TrainerCapabilities, TrainingBackend
from tinsmith.errors import UserError
from tinsmith.operations import Consistency
from tinsmith.settings import ConsistencySettings

PROBE_ID: Final = "consistency-probe"  # as model_id and as sampling_session_id; clients' ids contain colons
_LOSS: Final = "cross_entropy"
_SAMPLER_TIMEOUT_S: Final = 60.0  # probes queue behind the samples of all clients

_STANDS_OUT: Final = 3.0  # times the noise: from here on the direction of a movement can be trusted
_NOISE: Final = 4.0  # times the noise on the base model: allowed with an adapter
_FOLLOWED: Final = 0.25  # the share of the adapter's effect that the sampler shows may differ from 1 by this much
_FOLLOWED_SINCE: Final = 0.5  # the same for the movement since the last save, which is smaller

T = TypeVar("T")
ScoresN = npt.NDArray[np.float64]

Call = Callable[[Callable[[], Any]], Awaitable[Any]]
"""Queues a call of the training backend in the backend's thread, at once. Await its result."""

Scored = ops.ForwardBackwardOutput | ops.Failed

_log = logging.getLogger("tinsmith.consistency")


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """Tolerances. Noise is a root mean square; `unmeasured_noise` stands in if it could not be measured."""

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


class ProbeError(Exception):
    """The probes could not be scored. The message names the side that failed, and why."""


class Scoring:
    """The trainer's scores of a model as it is now: a forward pass of the probes, which is queued once it has begun.

    It must begin before anything changes the model.
    """

    def __init__(self, queue: Callable[[], Awaitable[Scored]]) -> None:
        self._queue = queue
        self._scored: asyncio.Future[Scored] | None = None

    def begin(self) -> asyncio.Future[Scored]:
        """Return the scores to wait for."""
        if self._scored is None:
            self._scored = asyncio.ensure_future(self._queue())
            self._scored.add_done_callback(_noticed)
        return self._scored

    @property
    def failed(self) -> bool:
        """Whether it has ended without scores."""
        ended = self._scored
        if ended is None or not ended.done():
            return False
        return ended.cancelled() or ended.exception() is not None or isinstance(ended.result(), ops.Failed)


def _noticed(ended: asyncio.Future[Scored]) -> None:
    """A comparison may fail before it asks for the scores: nobody else would look at what went wrong with them."""
    if not ended.cancelled() and (error := ended.exception()) is not None:
        _log.warning("the trainer could not score the probes: %s", error)


class Probes:
    """Those of one engine. Remembers the scores of the base model, and of the last consistent save of every model."""

    def __init__(
        self, backend: TrainingBackend, sampler: SamplingBackend, settings: ConsistencySettings, *, call: Call
    ) -> None:
        """`before_change` must be called before anything changes a model."""
        self._backend = backend
        self._sampler = sampler
        self._settings = settings
        self._call = call
        training, sampling = backend.trainer_capabilities, sampler.sampler_capabilities
        self._bounds = _bounds(training, sampling, settings)
        self._probes = probe_tokens(training, sampling, settings)
        self._impossible = _why_impossible(training, sampling)
        self._base: Scores | None = None
        self._last: dict[str, Scores] = {}
        self._scorings: dict[str, Scoring] = {}  # by model_id, of models that have not changed since

    def scoring(self, model_id: str) -> Scoring | None:
        """Return the trainer's scoring of a model as it is now. It begins before the next change of the model.

        Saves between two changes share it. Return None if nothing will be compared.
        """
        if self._settings.action == "off" or self._impossible is not None:
            return None
        found = self._scorings.get(model_id)
        if found is None or found.failed:
            found = self._scorings[model_id] = self._scoring(model_id)
        return found

    def _scoring(self, model_id: str) -> Scoring:
        return Scoring(partial(self._call, partial(self._score, model_id)))

    def before_change(self, models: Iterable[str]) -> None:
        """Queue the scorings that have not begun, ahead of later work."""
        for model_id in models:
            if (scoring := self._scorings.pop(model_id, None)) is not None:
                scoring.begin()

    async def compare(
        self, model_id: str, snapshot_id: str, lora: ops.LoraConfig, scoring: Scoring | None = None
    ) -> Consistency | None:
        """Compare a loaded snapshot with the model it was taken from. Return None if the settings say so.

        `scoring` is what `self.scoring` returned when the model was as the snapshot is; without it the model must not
        train meanwhile.
        """
        if self._settings.action == "off":
            return None
        if self._impossible is not None:
            return _told(snapshot_id, _not_compared(self._impossible))
        try:
            found = await self._compared(model_id, snapshot_id, lora, scoring or self._scoring(model_id))
        except TimeoutError:
            reason = f"the sampler is too busy: it did not score the probes within {_SAMPLER_TIMEOUT_S:.0f} s"
            found = _not_compared(reason)
        except ProbeError as error:
            found = Consistency(verdict="inconsistent", reason=str(error))
        return _told(snapshot_id, found)

    async def _compared(self, model_id: str, snapshot_id: str, lora: ops.LoraConfig, scoring: Scoring) -> Consistency:
        by_trainer = scoring.begin()
        by_sampler = asyncio.ensure_future(self._by_sampler(snapshot_id))
        try:
            base = await self._base_scores(lora)
            trainer_N = _trainer_scores(await asyncio.shield(by_trainer))  # other saves may wait for it, too
            if not np.isfinite(trainer_N).all():
                return _not_compared("the logprobs of the model are not finite: it has diverged")
            now = Scores(trainer_N=trainer_N, sampler_N=await by_sampler)
        finally:
            if not by_sampler.cancel() and not by_sampler.cancelled():
                by_sampler.exception()  # it may have failed where the trainer's scores decide already
        found = compare(now, base=base, last=self._last.get(model_id), bounds=self._bounds)
        if found.verdict == "consistent":
            self._last[model_id] = now
        return found

    def forget(self, model_id: str) -> None:
        """Drop what is remembered of a model that has been unloaded."""
        self._last.pop(model_id, None)
        self._scorings.pop(model_id, None)

    async def _base_scores(self, lora: ops.LoraConfig) -> Scores:
        """Score the base model once: with the sampler now, with the trainer once it has room for a new adapter."""
        if self._base is None:
            self._base = Scores(trainer_N=None, sampler_N=await self._by_sampler(None))
        if self._base.trainer_N is None and lora.rank > 0:
            try:
                result = await self._call(partial(self._score_fresh, lora))
            except UserError as error:  # no room: the difference on the base model stays an assumption
                _log.info("the trainer cannot score the base model now: %s", error)
            else:
                self._base = replace(self._base, trainer_N=_trainer_scores(result))
        return self._base

    def _score_fresh(self, lora: ops.LoraConfig) -> Scored:
        """Score with an untrained adapter, which changes nothing. The same LoRA shape reuses compiled programs."""
        self._backend.create_model(ops.CreateModel(model_id=PROBE_ID, lora=lora))
        try:
            return self._score(PROBE_ID)
        finally:
            self._backend.unload_model(PROBE_ID)

    def _score(self, model_id: str) -> Scored:
        data = tuple(_datum(probe) for probe in self._probes)
        (result,) = self._backend.forward([ops.Forward(model_id=model_id, data=data, loss_fn=_LOSS)])
        return result

    async def _by_sampler(self, snapshot_id: str | None) -> ScoresN:
        async with asyncio.timeout(_SAMPLER_TIMEOUT_S):
            results = await asyncio.gather(*(self._sampler.sample(_sample(p, snapshot_id)) for p in self._probes))
        return np.concatenate([_sampler_scores(result) for result in results])


def _told(snapshot_id: str, found: Consistency) -> Consistency:
    """Log a verdict, and return it."""
    if found.verdict == "consistent":
        _log.debug("%s is consistent: %s", snapshot_id, figures(found))
    elif found.verdict == "not compared":
        _log.warning("%s was not compared with its trainer: %s", snapshot_id, found.reason)
    else:
        _log.error("%s does not match the trained model: %s; %s", snapshot_id, found.reason, figures(found))
    return found


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


def _not_compared(reason: str) -> Consistency:
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


def figures(found: Consistency) -> str:
    """Describe the measured differences."""
    if found.max_difference is None or found.mean_difference is None:
        return "no differences were measured"
    return (
        f"logprobs of {found.num_tokens} probe tokens differ by at most {found.max_difference:.3g}, on average by "
        f"{found.mean_difference:.3g}; the adapter's own effect is {found.effect:.3g}"
    )


def probe_tokens(
    training: TrainerCapabilities, sampling: SamplerCapabilities, settings: ConsistencySettings
) -> tuple[ops.TokenArray, ...]:
    """Draw the probes. The same vocabulary always gives the same probes; each has different tokens."""
    context = min(training.max_context_tokens, sampling.max_context_tokens)
    length = min(settings.tokens, context - 1)  # the sampler appends one token to each
    vocab_size = min(training.vocab_size, sampling.vocab_size)
    rng = np.random.default_rng(0)
    return tuple(rng.integers(0, vocab_size, length).astype(np.int32) for _ in range(settings.probes))


def _bounds(training: TrainerCapabilities, sampling: SamplerCapabilities, settings: ConsistencySettings) -> Bounds:
    exact = training.dtype == sampling.dtype == "float32"
    bounds = FLOAT32 if exact else LOW_PRECISION
    return bounds if settings.max_difference is None else replace(bounds, max_difference=settings.max_difference)


def _why_impossible(training: TrainerCapabilities, sampling: SamplerCapabilities) -> str | None:
    if not sampling.prompt_logprobs:
        return "this sampler cannot score prompts (its prompt_logprobs capability is off)"
    if _LOSS not in training.losses:
        return f"this trainer does not offer the loss {_LOSS!r}, with which probes are scored"
    return None


def _datum(probe: ops.TokenArray) -> ops.Datum:
    targets = probe[1:].astype(np.int64)
    return ops.Datum(
        tokens_T=probe[:-1], loss_inputs={"target_tokens": targets, "weights": np.ones(len(targets), np.float32)}
    )


def _sample(probe: ops.TokenArray, snapshot_id: str | None) -> ops.Sample:
    return ops.Sample(
        sampling_session_id=PROBE_ID,
        snapshot_id=snapshot_id,
        prompt_P=probe,
        params=ops.SamplingParams(max_tokens=1, seed=0),
        prompt_logprobs=True,
    )


def _trainer_scores(result: Scored) -> ScoresN:
    return _joined([output["logprobs"] for output in _succeeded("trainer", result).loss_fn_outputs])


def _sampler_scores(result: ops.SampleOutput | ops.Failed) -> ScoresN:
    scores = _succeeded("sampler", result).prompt_logprobs
    assert scores is not None, "what a sampler returns is checked"
    return _joined([scores[1:]])


def _succeeded(side: str, result: T | ops.Failed) -> T:
    if isinstance(result, ops.Failed):
        msg = f"the {side} could not score the probes: {result.message}"
        raise ProbeError(msg)
    return result


def _joined(parts: Sequence[ops.Array]) -> ScoresN:
    return np.concatenate([np.asarray(part, np.float64).reshape(-1) for part in parts])
