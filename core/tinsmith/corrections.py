"""Off-policy corrections: what the distance between sampler and trainer does to the loss of each token.

A request may send `rollout_logprobs`, the sampler's logprobs of the targets, beside `logprobs`, the trainer's from
before the update. The corrections that its `loss_fn_config` asks for follow from these two alone: a weight for each
token, 0 where it is masked. So the core computes them, in float64, and multiplies an input of the loss by them; a
backend gets an ordinary pass. `docs/reference/protocol.md` has the formulas and their sources.

Array suffixes: T = tokens.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
import numpy.typing as npt

from tinsmith.errors import UnsupportedError, UserError
from tinsmith.losses import LossSpec
from tinsmith.operations import Array, Datum, ForwardBackward

ROLLOUT: Final = "rollout_logprobs"
MARKED: Final = "sequence_ratio_mask"
"""The input that names the tokens which were sampled: not zero."""

_TOKEN_CAP: Final = "token_tis_ratio_clip_high"
_SEQUENCE_CAP: Final = "sequence_tis_ratio_clip_high"
_TOKEN_BOUNDS: Final = ("token_mask_is_threshold_low", "token_mask_is_threshold_high")
_OUTLIER_BOUNDS: Final = ("outlier_token_is_threshold_low", "outlier_token_is_threshold_high")
_PRODUCT_BOUNDS: Final = ("product_mask_low", "product_mask_high")
_GEO_BOUNDS: Final = ("geo_mask_low", "geo_mask_high")
_PAIRS: Final = (_TOKEN_BOUNDS, _PRODUCT_BOUNDS, _GEO_BOUNDS)  # of the others, either bound may be left out

SETTINGS: Final = (_TOKEN_CAP, _SEQUENCE_CAP, *_TOKEN_BOUNDS, *_OUTLIER_BOUNDS, *_PRODUCT_BOUNDS, *_GEO_BOUNDS)
"""Every key of loss_fn_config that asks for a correction."""

_REDUCTIONS: Final[Mapping[str, Callable[[Sequence[float]], float]]] = {
    "mean": lambda values: sum(values) / len(values),
    "sum": sum,
    "min": min,
    "max": max,
}

Float64Array = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Correction:
    """Of one sequence: the weight of each token, and its metrics by name."""

    weight_T: Float64Array
    metrics: Mapping[str, float]


def are_sent(op: ForwardBackward) -> bool:
    """Return whether the pass is to be corrected, or at least measured."""
    return any(ROLLOUT in datum.loss_inputs for datum in op.data)


def settings_of(op: ForwardBackward) -> Mapping[str, float]:
    return {key: op.loss_fn_config[key] for key in SETTINGS if key in op.loss_fn_config}


def check(op: ForwardBackward, spec: LossSpec) -> None:
    """Raises UserError if the corrections asked for do not fit each other, or the loss."""
    settings = settings_of(op)
    if not are_sent(op):
        if settings:
            msg = f"loss_fn_config: {next(iter(settings))!r} needs {ROLLOUT!r} in the loss_fn_inputs of every datum"
            raise UserError(msg)
        return
    if not spec.scaled_by:
        msg = (
            f"loss_fn_inputs: {ROLLOUT!r} does not go with {spec.name!r}, whose losses no input multiplies; train with "
            "another loss, or leave it out"
        )
        raise UnsupportedError(msg)
    _check_settings(settings)


def _check_settings(settings: Mapping[str, float]) -> None:
    for key, value in settings.items():
        if value < 0 or (value == 0 and key in {_TOKEN_CAP, _SEQUENCE_CAP}):
            msg = f"loss_fn_config: {key!r} is {value}; ratios of probabilities are positive"
            raise UserError(msg)
    if _TOKEN_CAP in settings and _SEQUENCE_CAP in settings:
        msg = f"loss_fn_config: {_TOKEN_CAP!r} and {_SEQUENCE_CAP!r} exclude each other; send one weight's bound"
        raise UserError(msg)
    for pair in _PAIRS:
        sent = [key for key in pair if key in settings]
        if len(sent) == 1:
            msg = f"loss_fn_config: {sent[0]!r} comes without its other bound; send {pair[0]!r} and {pair[1]!r}"
            raise UserError(msg)
    for low, high in (*_PAIRS, _OUTLIER_BOUNDS):
        if low in settings and high in settings and settings[low] > settings[high]:
            msg = f"loss_fn_config: {low} {settings[low]} is above {high} {settings[high]}"
            raise UserError(msg)


def corrected(op: ForwardBackward, losses: Mapping[str, LossSpec]) -> ForwardBackward:
    """Return the pass as a backend computes it: weights are multiplied in, inputs and settings of corrections gone."""
    if not are_sent(op):
        return op
    spec, settings = losses[op.loss_fn], settings_of(op)
    config = {key: value for key, value in op.loss_fn_config.items() if key not in settings}
    data = tuple(replace(datum, loss_inputs=_weighted(datum, spec, settings)) for datum in op.data)
    return replace(op, data=data, loss_fn_config=config)


def _weighted(datum: Datum, spec: LossSpec, settings: Mapping[str, float]) -> Mapping[str, Array]:
    inputs, weight_T = datum.loss_inputs, of_sequence(datum.loss_inputs, settings).weight_T
    scaled = inputs[spec.scaled_by]
    with np.errstate(over="ignore"):  # an infinite loss is reported as such
        product = (scaled.astype(np.float64) * weight_T.reshape(scaled.shape)).astype(np.float32)
    kept = {"target_tokens", *spec.inputs}
    return {**{name: values for name, values in inputs.items() if name in kept}, spec.scaled_by: product}


def metrics_of(op: ForwardBackward) -> Mapping[str, float]:
    """Return the metrics of a pass; none if it has no `rollout_logprobs`.

    Means are over sequences, so that they stay right when the SDK joins the passes into which it has split a request.
    """
    if not are_sent(op):
        return {}
    settings = settings_of(op)
    every = [of_sequence(datum.loss_inputs, settings).metrics for datum in op.data]
    return {name: _REDUCTIONS[name.rpartition(":")[2]]([each[name] for each in every]) for name in every[0]}


def has_sampler_logprobs(op: ForwardBackward) -> bool:
    """Return whether the loss gets logprobs to compare the trainer's with: in an RL script, the sampler's."""
    return not are_sent(op) and any("logprobs" in datum.loss_inputs for datum in op.data)


def sampler_kl(op: ForwardBackward, outputs: Sequence[Mapping[str, Array]]) -> Mapping[str, float]:
    """Estimate the KL of the sampler and the trainer, in nats for each token, on the tokens that were sampled.

    These have a logprob in `logprobs` that is not 0, which stands at prompts. Means are over sequences, and the
    estimators are the same as of `rollout_kl`.
    """
    drifts = [drift_of(datum.loss_inputs, output) for datum, output in zip(op.data, outputs, strict=True)]
    drifts = [drift for drift in drifts if drift.size]
    if not drifts:
        return {}
    with np.errstate(over="ignore", invalid="ignore"):  # of a diverged model, it is no number either
        kl = [-float(drift.mean()) for drift in drifts]
        kl_k3 = [float((np.exp(drift) - 1.0 - drift).mean()) for drift in drifts]
    return {"sampler_kl:mean": sum(kl) / len(kl), "sampler_kl_k3:mean": sum(kl_k3) / len(kl_k3)}


def drift_of(inputs: Mapping[str, Array], outputs: Mapping[str, Array]) -> Float64Array:
    """Return the trainer's logprobs less the sampler's, of sampled tokens."""
    sampled_T = inputs["logprobs"].reshape(-1).astype(np.float64)
    drift_T: Float64Array = (outputs["logprobs"].reshape(-1) - sampled_T)[sampled_T != 0]
    return drift_T


def of_sequence(inputs: Mapping[str, Array], settings: Mapping[str, float]) -> Correction:
    """Compute the corrections of one sequence, of its tokens that are marked."""
    ratios = _Ratios.of(inputs)
    weight_T, clipped = _weights(ratios, settings)
    masked_T, of_tokens = _token_masks(ratios, settings)
    masked, of_sequences = _sequence_masks(ratios, settings)
    weight_T = np.where(masked_T | masked, 0.0, weight_T)
    return Correction(weight_T=weight_T, metrics={**ratios.metrics(), **clipped, **of_tokens, **of_sequences})


@dataclass(frozen=True, slots=True, kw_only=True)
class _Ratios:
    """How much likelier the trainer finds a sequence than the sampler did: by token, as a whole, and on the mean."""

    marked_T: npt.NDArray[np.bool_]
    drift_T: Float64Array  # logarithms of the ratios
    ratio_T: Float64Array  # 1 where a token is not marked
    product: float
    mean: float  # geometric

    @classmethod
    def of(cls, inputs: Mapping[str, Array]) -> "_Ratios":
        marked_T = inputs[MARKED].reshape(-1) != 0
        drift_T = inputs["logprobs"].reshape(-1).astype(np.float64) - inputs[ROLLOUT].reshape(-1)
        drift_T = np.where(marked_T, drift_T, 0.0)
        total = float(drift_T.sum())
        with np.errstate(over="ignore"):
            product, mean = float(np.exp(total)), float(np.exp(total / max(1, marked_T.sum())))
            return cls(marked_T=marked_T, drift_T=drift_T, ratio_T=np.exp(drift_T), product=product, mean=mean)

    def share(self, chosen_T: npt.NDArray[np.bool_]) -> float:
        return float((self.marked_T & chosen_T).sum()) / max(1, int(self.marked_T.sum()))

    def metrics(self) -> Mapping[str, float]:
        number = max(1, int(self.marked_T.sum()))
        of_marked = self.ratio_T[self.marked_T] if self.marked_T.any() else np.ones(1)
        return {
            "rollout_tokens:sum": float(self.marked_T.sum()),
            "rollout_kl:mean": -float(self.drift_T.sum()) / number,
            "rollout_kl_k3:mean": float((self.ratio_T - 1.0 - self.drift_T).sum()) / number,
            "rollout_ratio:min": float(of_marked.min()),
            "rollout_ratio:max": float(of_marked.max()),
        }


def _weights(ratios: _Ratios, settings: Mapping[str, float]) -> tuple[Float64Array, Mapping[str, float]]:
    if (cap := settings.get(_TOKEN_CAP)) is not None:
        clipped = ratios.share(ratios.ratio_T > cap)
        return np.where(ratios.marked_T, np.minimum(ratios.ratio_T, cap), 1.0), {"rollout_tokens_clipped:mean": clipped}
    if (cap := settings.get(_SEQUENCE_CAP)) is not None:
        weight_T = np.full_like(ratios.ratio_T, min(ratios.product, cap))
        return weight_T, {"rollout_sequences_clipped:mean": float(ratios.product > cap)}
    return np.ones_like(ratios.ratio_T), {}


def _token_masks(ratios: _Ratios, settings: Mapping[str, float]) -> tuple[npt.NDArray[np.bool_], Mapping[str, float]]:
    if _TOKEN_BOUNDS[0] not in settings:
        return np.zeros_like(ratios.marked_T), {}
    masked_T = ratios.marked_T & _outside(ratios.ratio_T, settings, _TOKEN_BOUNDS)
    return masked_T, {"rollout_tokens_masked:mean": ratios.share(masked_T)}


def _sequence_masks(ratios: _Ratios, settings: Mapping[str, float]) -> tuple[bool, Mapping[str, float]]:
    """Return whether any of the masks that were asked for holds the whole sequence back."""
    of_masks = {
        "outlier": (_OUTLIER_BOUNDS, ratios.ratio_T[ratios.marked_T]),
        "product": (_PRODUCT_BOUNDS, np.array(ratios.product)),
        "geo": (_GEO_BOUNDS, np.array(ratios.mean)),
    }
    masked = {
        name: bool(_outside(ratio, settings, bounds).any())
        for name, (bounds, ratio) in of_masks.items()
        if settings.keys() & set(bounds)
    }
    if not masked:
        return False, {}
    metrics = {f"rollout_sequences_masked_by_{name}:mean": float(value) for name, value in masked.items()}
    return any(masked.values()), {**metrics, "rollout_sequences_masked:mean": float(any(masked.values()))}


def _outside(ratio: Float64Array, settings: Mapping[str, float], bounds: tuple[str, str]) -> npt.NDArray[np.bool_]:
    low, high = settings.get(bounds[0], 0.0), settings.get(bounds[1], np.inf)
    outside: npt.NDArray[np.bool_] = (ratio < low) | (ratio > high)
    return outside
