"""Off-policy corrections against an oracle of scalars, written from the published formulas."""

import math
from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import pytest

from tinsmith import corrections
from tinsmith.losses import BUILTIN_LOSSES
from tinsmith.operations import Array, Datum, ForwardBackward
from tinsmith.testing import reference

LOSSES = {spec.name: spec for spec in BUILTIN_LOSSES}
CORRECTED = [spec.name for spec in BUILTIN_LOSSES if spec.scaled_by]
CASES = 1000
EVERY: tuple[Mapping[str, float], ...] = (
    {},
    {"token_tis_ratio_clip_high": 1.1},
    {"sequence_tis_ratio_clip_high": 1.3},
    {"token_mask_is_threshold_low": 0.8, "token_mask_is_threshold_high": 1.2},
    {"token_tis_ratio_clip_high": 2.0, "token_mask_is_threshold_low": 0.7, "token_mask_is_threshold_high": 1.4},
    {"outlier_token_is_threshold_low": 0.6},
    {"outlier_token_is_threshold_high": 1.6},
    {"product_mask_low": 0.5, "product_mask_high": 2.0},
    {"geo_mask_low": 0.97, "geo_mask_high": 1.03},
    {
        "sequence_tis_ratio_clip_high": 1.5,
        "token_mask_is_threshold_low": 0.7,
        "token_mask_is_threshold_high": 1.5,
        "outlier_token_is_threshold_low": 0.4,
        "outlier_token_is_threshold_high": 2.5,
        "geo_mask_low": 0.9,
        "geo_mask_high": 1.1,
    },
)

Case = tuple[Array, ForwardBackward]  # the trainer's logprobs during the pass [T], and the pass


def draw(index: int) -> Case:
    rng = np.random.default_rng([index, 11])
    length = int(rng.integers(1, 40))
    sampled = (rng.random(length) < rng.choice([0.0, 0.6, 1.0], p=[0.05, 0.35, 0.6])).astype(np.float32)
    old = (-rng.exponential(2.0, length)).astype(np.float32)
    inputs = {
        "target_tokens": np.zeros(length, np.int64),
        "logprobs": old,
        "rollout_logprobs": (old - rng.normal(0.0, rng.choice([0.01, 0.2]), length)).astype(np.float32),
        "advantages": rng.normal(size=length).astype(np.float32),
        "sequence_ratio_mask": sampled,
    }
    loss_fn = CORRECTED[index % len(CORRECTED)]
    config = {**reference.NEEDED_CONFIG.get(loss_fn, {}), **EVERY[index // len(CORRECTED) % len(EVERY)]}
    datum = Datum(tokens_T=np.zeros(length, np.int32), loss_inputs=inputs)
    logp = old.astype(np.float64) + rng.normal(0.0, 0.2, length)
    return logp, ForwardBackward(model_id="m", data=(datum,), loss_fn=loss_fn, loss_fn_config=config)


def ratios(inputs: Mapping[str, Array]) -> dict[int, float]:
    """By position, of the tokens that were sampled."""
    return {
        t: math.exp(float(inputs["logprobs"][t]) - float(inputs["rollout_logprobs"][t]))
        for t in range(len(inputs["logprobs"]))
        if inputs["sequence_ratio_mask"][t]
    }


def is_masked(of_tokens: Mapping[int, float], config: Mapping[str, float]) -> bool:
    product = math.prod(of_tokens.values())
    mean = product ** (1 / max(1, len(of_tokens)))
    return (
        any(not within(each, config, "outlier_token_is_threshold") for each in of_tokens.values())
        or not within(product, config, "product_mask")
        or not within(mean, config, "geo_mask")
    )


def within(ratio: float, config: Mapping[str, float], name: str) -> bool:
    return config.get(f"{name}_low", -math.inf) <= ratio <= config.get(f"{name}_high", math.inf)


def expected_weights(inputs: Mapping[str, Array], config: Mapping[str, float]) -> list[float]:
    of_tokens, weights = ratios(inputs), []
    for t in range(len(inputs["logprobs"])):
        weight = 1.0
        if "sequence_tis_ratio_clip_high" in config:
            weight = min(math.prod(of_tokens.values()), config["sequence_tis_ratio_clip_high"])
        if t in of_tokens:
            if "token_tis_ratio_clip_high" in config:
                weight = min(of_tokens[t], config["token_tis_ratio_clip_high"])
            if not within(of_tokens[t], config, "token_mask_is_threshold"):
                weight = 0.0
        weights.append(0.0 if is_masked(of_tokens, config) else weight)
    return weights


def test_a_thousand_corrected_losses_are_the_weighted_losses_of_the_oracle() -> None:
    seen = {"masked": 0, "untouched": 0, "between": 0}
    for logp, op in map(draw, range(CASES)):
        inputs, computed = op.data[0].loss_inputs, corrections.corrected(op, LOSSES)
        spec, passed_on = LOSSES[op.loss_fn], computed.data[0].loss_inputs
        assert passed_on.keys() == {"target_tokens", *spec.inputs}
        assert computed.loss_fn_config.keys() <= set(spec.settings)
        assert all(passed_on[name].dtype == np.float32 for name in spec.inputs)
        config = {**spec.config, **computed.loss_fn_config}
        loss, slope = spec.of_sequence(
            np, logp, {name: passed_on[name].astype(np.float64) for name in spec.inputs}, config
        )
        weights = np.array(expected_weights(inputs, op.loss_fn_config))
        plain = {name: inputs[name] for name in spec.inputs}
        np.testing.assert_allclose(
            loss, weights * reference.losses(op.loss_fn, logp, plain, config), rtol=1e-6, atol=1e-9
        )
        slopes = weights * reference.loss_derivatives(op.loss_fn, logp, plain, config)
        np.testing.assert_allclose(slope, slopes, rtol=1e-6, atol=1e-6)
        for name, chosen in (("masked", weights == 0), ("untouched", weights == 1)):
            seen[name] += int(chosen.any())
        seen["between"] += int(((weights != 0) & (weights != 1)).any())
    assert min(seen.values()) > CASES / 20, seen


def test_metrics_are_means_over_sequences_and_say_what_was_clipped_and_masked() -> None:
    for first in range(0, CASES, 50):
        data = [draw(first + 4 * number)[1].data[0] for number in range(5)]
        config = EVERY[first // 50 % len(EVERY)]
        found = corrections.metrics_of(
            ForwardBackward(model_id="m", data=tuple(data), loss_fn="ppo", loss_fn_config=config)
        )
        wanted = [expected_metrics(datum.loss_inputs, config) for datum in data]
        assert found.keys() == wanted[0].keys()
        for name, value in found.items():
            values = [each[name] for each in wanted]
            by_reduction = {"mean": sum(values) / 5, "sum": sum(values), "min": min(values), "max": max(values)}
            assert value == pytest.approx(by_reduction[name.partition(":")[2]], rel=1e-9, abs=1e-12), name


def expected_metrics(inputs: Mapping[str, Array], config: Mapping[str, float]) -> dict[str, float]:
    of_tokens = ratios(inputs)
    values, number = list(of_tokens.values()), max(1, len(of_tokens))
    product = math.prod(values)
    found = {
        "rollout_tokens:sum": len(values),
        "rollout_kl:mean": sum(-math.log(each) for each in values) / number,
        "rollout_kl_k3:mean": sum(each - 1 - math.log(each) for each in values) / number,
        "rollout_ratio:min": min(values, default=1.0),
        "rollout_ratio:max": max(values, default=1.0),
    }
    if (cap := config.get("token_tis_ratio_clip_high")) is not None:
        found["rollout_tokens_clipped:mean"] = sum(each > cap for each in values) / number
    if (cap := config.get("sequence_tis_ratio_clip_high")) is not None:
        found["rollout_sequences_clipped:mean"] = float(product > cap)
    if "token_mask_is_threshold_low" in config:
        masked = sum(not within(each, config, "token_mask_is_threshold") for each in values)
        found["rollout_tokens_masked:mean"] = masked / number
    masks = {
        "outlier": any(not within(each, config, "outlier_token_is_threshold") for each in values),
        "product": not within(product, config, "product_mask"),
        "geo": not within(product ** (1 / number), config, "geo_mask"),
    }
    asked = [name for name in masks if any(key.startswith(name) for key in config)]
    found |= {f"rollout_sequences_masked_by_{name}:mean": float(masks[name]) for name in asked}
    if asked:
        found["rollout_sequences_masked:mean"] = float(any(masks[name] for name in asked))
    return found


def test_a_pass_without_them_is_what_it_was() -> None:
    _, op = draw(0)
    inputs = {name: op.data[0].loss_inputs[name] for name in ("target_tokens", "logprobs", "advantages")}
    plain = replace(op, data=(replace(op.data[0], loss_inputs=inputs),), loss_fn="ppo", loss_fn_config={})
    assert corrections.corrected(plain, LOSSES) is plain
    assert corrections.metrics_of(plain) == {}


def test_huge_distances_are_bounded() -> None:
    _, op = draw(0)
    length = len(op.data[0].tokens_T)
    far = {"rollout_logprobs": np.full(length, -3e38, np.float32), "sequence_ratio_mask": np.ones(length, np.float32)}
    inputs = {**op.data[0].loss_inputs, **far}
    for key in ("token_tis_ratio_clip_high", "sequence_tis_ratio_clip_high"):
        np.testing.assert_array_equal(corrections.of_sequence(inputs, {key: 2.0}).weight_T, 2.0)
