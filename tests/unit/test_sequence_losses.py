"""Losses of whole sequences, packed as trainers pack them, against the float64 oracle and a library of others."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch

from tinsmith import corrections
from tinsmith.losses import BUILTIN_LOSSES
from tinsmith.operations import Array, Datum, ForwardBackward
from tinsmith.testing import reference
from tinsmith_workers.sequences import segments
from tinsmith_workers.torch import LossTable

LOSSES = {spec.name: spec for spec in BUILTIN_LOSSES}
CONFIG = {"clip_low_threshold": 0.97, "clip_high_threshold": 1.05}
CASES = 1000

Case = tuple[Array, Datum]  # logprobs [T], and a sequence with the inputs of gspo
Results = list[tuple[Array, Array]]
"""Of each case: the loss of each token, and its derivative by the logprob."""


def draw(index: int) -> Case:
    """Ratios on both sides of the thresholds, masks of one token to all; float32, as requests have them."""
    rng = np.random.default_rng([index, 5])
    length = int(rng.integers(1, 130))
    logp = (-rng.exponential(2.0, length)).astype(np.float32)
    mask = (rng.random(length) < rng.choice([0.1, 0.7, 1.0])).astype(np.float32)
    mask[rng.integers(length)] = 1.0
    inputs = {
        "target_tokens": np.zeros(length, np.int64),
        "logprobs": (logp - rng.normal(rng.normal(0.0, 0.06), 0.2, length)).astype(np.float32),
        "advantages": rng.normal(size=length).astype(np.float32),
        "sequence_ratio_mask": mask,
    }
    return logp, Datum(tokens_T=np.zeros(length, np.int32), loss_inputs=inputs)


def operation(cases: Sequence[Case]) -> ForwardBackward:
    data = tuple(datum for _, datum in cases)
    return ForwardBackward(model_id="m", data=data, loss_fn="gspo", loss_fn_config=CONFIG)


def in_torch(cases: Sequence[Case], beside: Sequence[ForwardBackward] = ()) -> Results:
    """Compute them in one stream, behind the sequences of other operations."""
    table, every = LossTable(LOSSES), list(segments([*beside, operation(cases)], LOSSES))
    batch, first = table.batch(every, torch.device("cpu"), padding=3), len(every) - len(cases)
    before, width = sum(each.num_tokens for each in every[:first]), batch.targets_TK.shape[1]
    logp = np.concatenate([np.full(before, -1.0), *(logp for logp, _ in cases), np.zeros(3)]).astype(np.float32)
    logp_TK = torch.from_numpy(np.repeat(logp[:, None], width, axis=1))
    found = table.per_token(logp_TK, table.with_sums(logp_TK, batch))
    cuts = np.cumsum([before, *(len(logp) for logp, _ in cases)])
    loss, derivative = (np.split(each[:, 0].numpy(), cuts)[1:-1] for each in found)
    return list(zip(loss, derivative, strict=True))


def in_jax(cases: Sequence[Case], skip: int = 0) -> Results:
    """Compute them in one stream, behind so many unused tiles."""
    jax = pytest.importorskip("jax")
    from tinsmith_jax.loss_table import LossBatch, LossTables
    from tinsmith_jax.tiles import TILE

    table, tiles = LossTables(LOSSES).of(summed=True), [-(-len(logp) // TILE) for logp, _ in cases]
    rows = (skip + sum(tiles)) * TILE
    starts = (skip + np.cumsum([0, *tiles[:-1]])) * TILE
    logp_TK, kind_T = np.full((rows, 1), -1.0, np.float32), np.full(rows, -1, np.int32)
    inputs_ITK, first_n = np.zeros((len(table.inputs), rows, 1), np.float32), np.arange(rows // TILE) < skip
    for (logp, datum), start in zip(cases, starts, strict=True):
        own = slice(start, start + len(logp))
        logp_TK[own, 0], kind_T[own], first_n[start // TILE] = logp, table.kinds["gspo"], True
        for name in table.inputs:
            inputs_ITK[table.inputs.index(name), own, 0] = datum.loss_inputs[name]
    config_CT = np.stack([np.full(rows, CONFIG[key], np.float32) for _, key in table.settings])
    batch = LossBatch(np.zeros((rows, 1), np.int32), kind_T, inputs_ITK, config_CT)
    run = jax.jit(lambda logp, batch, first: table.per_token(logp, table.with_sums(logp, batch, first)))
    found = [np.asarray(each)[:, 0] for each in run(logp_TK, batch, first_n)]
    lengths = [len(logp) for logp, _ in cases]
    return [
        (found[0][start : start + length], found[1][start : start + length])
        for start, length in zip(starts, lengths, strict=True)
    ]


@cache
def expected() -> Results:
    """Return what the oracle finds for the thousand cases."""
    cases = [(logp, datum.loss_inputs) for logp, datum in map(draw, range(CASES))]
    return [
        (reference.losses("gspo", *case, CONFIG), reference.loss_derivatives("gspo", *case, CONFIG)) for case in cases
    ]


in_both = pytest.mark.parametrize("compute", [in_torch, in_jax])


@in_both
def test_a_thousand_sequences_are_those_of_the_oracle(compute: Callable[[Sequence[Case]], Results]) -> None:
    cases = [draw(index) for index in range(CASES)]
    clipped = 0
    for (loss, derivative), (losses, slopes) in zip(compute(cases), expected(), strict=True):
        np.testing.assert_allclose(loss, losses, rtol=1e-6, atol=1e-6)
        np.testing.assert_allclose(derivative, slopes, rtol=2e-6, atol=1e-6)
        clipped += int((derivative == 0).any())
    assert CASES / 4 < clipped < CASES


@in_both
def test_a_sequence_has_the_same_bits_in_any_company(compute: Callable[..., Results]) -> None:
    cases = [draw(index) for index in range(40)]
    together = compute(cases)
    if compute is in_torch:
        weights = {"target_tokens": np.zeros((7, 3), np.int64), "weights": np.ones((7, 3), np.float32)}
        other = Datum(tokens_T=np.zeros(7, np.int32), loss_inputs=weights)
        further = compute(cases, [ForwardBackward(model_id="other", data=(other,))])
    else:
        further = compute(cases, 3)
    for case, beside, behind in zip(cases[::8], together[::8], further[::8], strict=True):
        ((loss, derivative),) = compute([case])
        for found in (beside, behind):
            np.testing.assert_array_equal(found[0], loss)
            np.testing.assert_array_equal(found[1], derivative)


def test_without_a_marked_token_the_ratio_is_one() -> None:
    logp, datum = draw(0)
    none = {**datum.loss_inputs, "sequence_ratio_mask": np.zeros_like(logp)}
    case = logp, Datum(tokens_T=datum.tokens_T, loss_inputs=none)
    ((loss, derivative),) = in_torch([case])
    np.testing.assert_array_equal(loss, -datum.loss_inputs["advantages"])
    np.testing.assert_array_equal(derivative, -datum.loss_inputs["advantages"])


SURROGATES = {  # ours, by the names of polgrad's ratio and surrogate
    "importance_sampling": ("TOKEN", "PG"),
    "ppo": ("TOKEN", "PG_CLIP"),
    "cispo": ("TOKEN", "CISPO"),
    "gspo": ("SEQUENCE_TOKEN", "PG_CLIP"),
}
CAPS = {"": 0.0, "token_tis_ratio_clip_high": 1.1, "sequence_tis_ratio_clip_high": 1.5}


@pytest.mark.parametrize(
    "cap", [pytest.param(cap, id=cap or "uncorrected", marks=[pytest.mark.thorough] if cap else []) for cap in CAPS]
)
@pytest.mark.parametrize("name", SURROGATES)
def test_polgrad_finds_the_same(name: str, cap: str) -> None:
    """A thousand sequences in float64, by another's definition of the loss and torch's automatic differentiation.

    Corrections multiply the advantages in float32, as requests have them.
    """
    losses: Any = pytest.importorskip("polgrad.losses")
    from polgrad.aggregate import Aggregation

    cases = [draw(index) for index in range(CASES)]
    logp, old, rollout, advantages, mask = (np.zeros((CASES, 130)) for _ in range(5))
    for row, (scores, datum) in enumerate(cases):
        inputs, own = datum.loss_inputs, (row, slice(len(scores)))
        logp[own], old[own], mask[own] = scores, inputs["logprobs"], inputs["sequence_ratio_mask"]
        advantages[own] = inputs["advantages"]
        drift = np.random.default_rng([row, 6]).normal(0.0, 0.2, len(scores))
        rollout[own] = (inputs["logprobs"] - drift).astype(np.float32)
    ratio, surrogate = SURROGATES[name]
    low, high = 1 - CONFIG["clip_low_threshold"], CONFIG["clip_high_threshold"] - 1
    level = "token" if cap.startswith("token") else "sequence"
    config = losses.PolicyLossConfig(
        ratio=losses.RatioKind[ratio],
        surrogate=losses.SurrogateKind[surrogate],
        clip=None if surrogate == "PG" else losses.ClipConfig(low, high),
        aggregation=Aggregation.SEQ_MEAN_TOKEN_SUM,
        is_correction=losses.ISCorrectionConfig(CAPS[cap], level) if cap else None,
    )
    torch_logp = torch.tensor(logp, requires_grad=True)
    theirs = losses.policy_loss(
        config=config,
        logprobs=torch_logp,
        old_logprobs=torch.tensor(old),
        advantages=torch.tensor(advantages),
        response_mask=torch.tensor(mask > 0),
        rollout_logprobs=torch.tensor(rollout) if cap else None,
    ).per_token_objective
    (slopes,) = torch.autograd.grad(theirs.sum(), torch_logp)
    spec, exact = LOSSES[name], {"rtol": 1e-6, "atol": 1e-6} if cap else {"rtol": 1e-9, "atol": 1e-12}
    thresholds = {} if surrogate == "PG" else CONFIG
    for row, (scores, datum) in enumerate(cases):
        own, inputs = (row, slice(len(scores))), dict(datum.loss_inputs)
        if cap:
            inputs["rollout_logprobs"] = rollout[own].astype(np.float32)
            sent = replace(operation([(scores, replace(datum, loss_inputs=inputs))]), loss_fn=name)
            asked = replace(sent, loss_fn_config={**thresholds, cap: CAPS[cap]})
            inputs = dict(corrections.corrected(asked, LOSSES).data[0].loss_inputs)
        wide = {each: values.astype(np.float64) for each, values in inputs.items()}
        loss, derivative = spec.of_sequence(np, logp[own], wide, thresholds)
        counted = mask[own]  # theirs are of the response's tokens alone
        np.testing.assert_allclose(loss * counted, theirs.detach().numpy()[own], **exact)
        np.testing.assert_allclose(derivative * counted, slopes.numpy()[own], **exact)
