"""What attackers ask in training: every number at its extremes, every token, weights that are not numbers.

Everything passes `check_operation`.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any, Final

import numpy as np

from tinsmith.backend import ModelState, TrainerCapabilities
from tinsmith.losses import BUILTIN_LOSSES, LossSpec
from tinsmith.operations import AdamParams, Array, Datum, Forward, ForwardBackward, LoraConfig, OptimStep
from tinsmith.ranges import training_ranges
from tinsmith.testing.abuse_values import drawn, extremes
from tinsmith.testing.model_driver import random_datum
from tinsmith.testing.reference import NEEDED_CONFIG

LOSSES: Final[Mapping[str, LossSpec]] = {spec.name: spec for spec in BUILTIN_LOSSES}

Step = ForwardBackward | Forward | OptimStep
Calls = Callable[[str], Sequence[Step]]

_ADAM = ("learning_rate", "beta1", "beta2", "eps", "weight_decay", "grad_clip_norm")
_THRESHOLDS = ("clip_low_threshold", "clip_high_threshold")
_LENGTH = 7
_RUINS = (math.nan, math.inf, -math.inf, 3.4e38, 1e-45)


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """What an attacker asks, in order, of a model that is healthy at first."""

    what: str
    calls: Calls
    lora: LoraConfig | None = None  # of a model of its own; None: one that all cases use
    weights: float | None = None  # of every tenth number of each matrix; None: as they are

    def ruined(self, state: ModelState) -> ModelState:
        """Return the state from which the attacker starts."""
        value = self.weights
        return (
            state if value is None else replace(state, weights={k: _ruin(w, value) for k, w in state.weights.items()})
        )


def _ruin(array: Array, value: float) -> Array:
    changed = array.copy()
    changed.reshape(-1)[::10] = value
    return changed


def cases_of(capabilities: TrainerCapabilities, group: str, num_random: int, *, long_form: bool) -> Iterator[Case]:
    match group:
        case "random":
            return (_random(capabilities, seed) for seed in range(num_random))
        case "loss inputs":
            return _loss_inputs(capabilities, _values(capabilities, "loss_fn_inputs", long_form=long_form))
        case "loss settings":
            return _loss_settings(capabilities, _values(capabilities, "loss_fn_config", long_form=long_form))
        case _:
            return _GROUPS[group](capabilities)


def _values(capabilities: TrainerCapabilities, name: str, *, long_form: bool) -> list[float]:
    allowed = training_ranges(capabilities)[name]
    return extremes(allowed) if long_form else [allowed.low, -1e-45, 0.0, 1e-45, 1e30, allowed.high]


def _steps(capabilities: TrainerCapabilities) -> Iterator[Case]:
    ranges = training_ranges(capabilities)
    for name in _ADAM:
        for value in extremes(ranges[f"adam_params: {name}"]):
            yield _step_case(capabilities, AdamParams(**{name: value}))
    ends = [(ranges[f"adam_params: {name}"].low, ranges[f"adam_params: {name}"].high) for name in _ADAM]
    for values in product(*ends):
        if sum(value in end[1:] for value, end in zip(values, ends, strict=True)) in (0, 2, len(_ADAM)):
            yield _step_case(capabilities, AdamParams(**dict(zip(_ADAM, values, strict=True))))


def _step_case(capabilities: TrainerCapabilities, adam: AdamParams) -> Case:
    """A step with a gradient, and one without."""
    data = (random_datum(1, _LENGTH, capabilities.vocab_size),)

    def calls(model_id: str) -> Sequence[Step]:
        step = OptimStep(model_id=model_id, adam=adam)
        return ForwardBackward(model_id=model_id, data=data), step, step, Forward(model_id=model_id, data=data)

    return Case(what=str(adam), calls=calls)


def _loss_inputs(capabilities: TrainerCapabilities, values: Sequence[float]) -> Iterator[Case]:
    for spec in _offered(capabilities):
        for name, value in product(spec.inputs, values):
            yield _pass_case(capabilities, spec, {name: value})
        for pair in product((min(values), max(values)), repeat=len(spec.inputs)):
            yield _pass_case(capabilities, spec, dict(zip(spec.inputs, pair, strict=True)))


def _loss_settings(capabilities: TrainerCapabilities, values: Sequence[float]) -> Iterator[Case]:
    for spec in _offered(capabilities):
        for name, value in product(spec.settings, values):
            yield _pass_case(capabilities, spec, {}, _in_order(spec, {name: value}))


def _in_order(spec: LossSpec, config: Mapping[str, float]) -> Mapping[str, float]:
    """Set both clipping thresholds, if the loss has them, with the lower one first."""
    if not set(_THRESHOLDS) <= set(spec.settings):
        return config
    both = sorted({**NEEDED_CONFIG.get(spec.name, {}), **spec.config, **config}[name] for name in _THRESHOLDS)
    return {**config, **dict(zip(_THRESHOLDS, both, strict=True))}


def _offered(capabilities: TrainerCapabilities) -> list[LossSpec]:
    return [spec for name, spec in LOSSES.items() if name in capabilities.losses]


def _pass_case(
    capabilities: TrainerCapabilities,
    spec: LossSpec,
    inputs: Mapping[str, float],
    config: Mapping[str, float] | None = None,
) -> Case:
    """A pass with every other number of some inputs replaced, and a step with its gradient."""
    datum = random_datum(2, _LENGTH, capabilities.vocab_size)
    filled = {name: _every_other(inputs.get(name, -1.0), _LENGTH) for name in spec.inputs}
    data = (replace(datum, loss_inputs={"target_tokens": datum.loss_inputs["target_tokens"], **filled}),)
    fields: dict[str, Any] = {"data": data, "loss_fn": spec.name, "loss_fn_config": _in_order(spec, config or {})}

    def calls(model_id: str) -> Sequence[Step]:
        return (
            ForwardBackward(model_id=model_id, **fields),
            OptimStep(model_id=model_id, adam=AdamParams(grad_clip_norm=1.0)),
            Forward(model_id=model_id, **fields),
        )

    return Case(what=f"{spec.name} {dict(inputs)} {dict(config or {})}", calls=calls)


def _every_other(value: float, length: int) -> Array:
    values = np.full(length, 0.5, np.float32)
    values[::2] = value
    return values


def _tokens(capabilities: TrainerCapabilities) -> Iterator[Case]:
    ids = [int(value) for value in extremes(training_ranges(capabilities)["token id"])]
    longest = min(capabilities.max_context_tokens, capabilities.max_batch_tokens)
    for token, target in product(ids, repeat=2):
        yield _token_case(np.full(_LENGTH, token, np.int32), np.full(_LENGTH, target))
    for length in (1, 2, longest - 1, longest):
        yield _token_case(np.zeros(length, np.int32), np.arange(length) % capabilities.vocab_size)
    for width in {1, min(2, capabilities.max_targets_per_token), capabilities.max_targets_per_token}:
        yield _token_case(np.zeros(_LENGTH, np.int32), np.full((_LENGTH, width), ids[-1]))


def _token_case(tokens: Array, targets: Array) -> Case:
    datum = Datum(
        tokens_T=tokens, loss_inputs={"target_tokens": targets, "weights": np.ones(targets.shape, np.float32)}
    )

    def calls(model_id: str) -> Sequence[Step]:
        step = OptimStep(model_id=model_id, adam=AdamParams())
        return ForwardBackward(model_id=model_id, data=(datum,)), step, Forward(model_id=model_id, data=(datum,))

    return Case(
        what=f"tokens {tokens[:1]} x {len(tokens)}, targets {list(targets.shape)} {targets.flat[0]}", calls=calls
    )


def _adapters(capabilities: TrainerCapabilities) -> Iterator[Case]:
    ranges = training_ranges(capabilities)
    plain = _step_case(capabilities, AdamParams(learning_rate=1e-2))
    for name in ("rank", "seed", "alpha"):
        for value in extremes(ranges[f"lora_config: {name}"]):
            if (name, value) == ("rank", 0):
                continue  # a model without an adapter
            fields: dict[str, Any] = {"rank": min(4, capabilities.max_lora_rank), "seed": 1, name: value}
            lora = LoraConfig(**fields, **_flags(capabilities))
            yield replace(plain, what=str(lora), lora=lora)


def _flags(capabilities: TrainerCapabilities) -> dict[str, bool]:
    return {f"train_{target}": target in capabilities.lora_targets for target in ("attn", "mlp", "unembed")}


def _ruined_weights(capabilities: TrainerCapabilities) -> Iterator[Case]:
    """A checkpoint may hold them, and a model that diverges has them."""
    plain = _step_case(capabilities, AdamParams())
    clipped = _step_case(capabilities, AdamParams(learning_rate=1.0, weight_decay=1.0, grad_clip_norm=1e-3))
    for value, case in product(_RUINS, (plain, clipped)):
        yield replace(case, what=f"weights of {value}", weights=value)


def _random(capabilities: TrainerCapabilities, seed: int) -> Case:
    rng, ranges = np.random.default_rng([seed, 33]), training_ranges(capabilities)
    adam = AdamParams(**{name: drawn(rng, ranges[f"adam_params: {name}"]) for name in _ADAM})
    offered = _offered(capabilities)
    spec = offered[rng.integers(len(offered))]
    config = {name: drawn(rng, ranges["loss_fn_config"]) for name in spec.settings if rng.random() < 0.5}
    config = dict(_in_order(spec, config))
    length = int(rng.integers(1, min(64, capabilities.max_context_tokens) + 1))
    datum = random_datum(seed, length, capabilities.vocab_size)
    inputs = {
        name: np.array([drawn(rng, ranges["loss_fn_inputs"]) for _ in range(length)], np.float32)
        for name in spec.inputs
    }
    data = (replace(datum, loss_inputs={"target_tokens": datum.loss_inputs["target_tokens"], **inputs}),)

    def calls(model_id: str) -> Sequence[Step]:
        one = ForwardBackward(model_id=model_id, data=data, loss_fn=spec.name, loss_fn_config=config)
        return one, OptimStep(model_id=model_id, adam=adam), one, OptimStep(model_id=model_id, adam=adam)

    ruined = float(rng.choice(_RUINS)) if rng.random() < 0.2 else None
    return Case(what=f"random {seed}: {spec.name} {config} {adam}", calls=calls, weights=ruined)


_GROUPS: Final[Mapping[str, Callable[[TrainerCapabilities], Iterator[Case]]]] = {
    "steps": _steps,
    "tokens": _tokens,
    "adapters": _adapters,
    "ruined weights": _ruined_weights,
}
GROUPS: Final = (*_GROUPS, "loss inputs", "loss settings", "random")
