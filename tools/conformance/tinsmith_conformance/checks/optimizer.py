"""AdamW, against float64, on the weights that the server exports."""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from tinsmith_conformance.adapters import exported
from tinsmith_conformance.data import OTHER_TOKENS, learned
from tinsmith_conformance.oracle import AdamW, Floats
from tinsmith_conformance.registry import Group
from tinsmith_conformance.tester import Model, Tester
from tinsmith_conformance.verdicts import expect

GROUP: Final = Group("optimizer", "AdamW against float64.")

_SMALL: Final = 1e-5  # a learning rate at which two steps leave gradients as they are
_KEPT: Final = 0.98  # of all weights: near a gradient of 0, its sign depends on rounding


def _second_factors(weights: dict[str, Floats]) -> dict[str, Floats]:
    """Return LoRA's B, which is 0 at first; until it moves, A has no gradient."""
    found = {name: values for name, values in weights.items() if "lora_B" in name}
    expect(found, f"no exported weight is a lora_B: {sorted(weights)[:4]}")
    return found


def _gradient(t: Tester, tokens: Any, seed: int = 1) -> dict[str, Floats]:
    """Return the gradient by each B of a new model: where plain descent goes, by its rate."""
    model = t.model(seed=seed)
    model.descend([learned(tokens)])
    return {name: -values / t.rate for name, values in _second_factors(exported(t, model, "descended")).items()}


def _norm(gradient: dict[str, Floats]) -> float:
    return float(np.sqrt(sum((values**2).sum() for values in gradient.values())))


@GROUP.each(
    [
        ("its defaults", {}),
        ("beta1", {"beta1": 0.5}),
        ("beta2", {"beta2": 0.5}),
        ("a large eps", {"eps": 1.0}),
    ]
)
def adam(t: Tester, case: tuple[str, dict[str, float]]) -> None:
    """Two steps with {case} equal AdamW's in float64.

    Learning rates and betas of recipes mean something else here.
    """
    first, second = (_gradient(t, tokens) for tokens in ((12, 7, 31, 5), OTHER_TOKENS))
    model = t.model()
    for tokens in ((12, 7, 31, 5), OTHER_TOKENS):
        model.forward_backward([learned(tokens)]).result()
        model.optim_step(seq_id=None, learning_rate=_SMALL, **case[1]).result()
    for name, values in _second_factors(exported(t, model, "stepped")).items():
        wanted = AdamW(np.zeros_like(values))
        for gradient in (first, second):
            wanted.step(gradient[name], learning_rate=_SMALL, **case[1])
        near = np.abs(values - wanted.weights) <= 0.05 * np.abs(wanted.weights).max()
        expect(near.mean() >= _KEPT, f"{name}: {near.mean():.0%} of the weights are those of AdamW")


@GROUP.check
def weight_decay(t: Tester) -> None:
    """Weight decay shrinks the weights by learning rate times decay, whatever the gradient.

    Regularisation is dropped without a word, or follows Adam instead of AdamW.
    """
    model = t.model()
    before = exported(t, model, "before")
    model.step([learned()], learning_rate=0.01, weight_decay=0.5)
    after = exported(t, model, "after")
    for name, values in before.items():
        if "lora_A" in name:
            off = np.abs(after[name] - values * (1 - 0.01 * 0.5)).max()
            expect(off < 1e-6 * np.abs(values).max() + 1e-7, f"{name} is off by {off:.2g}")


@GROUP.check
def learning_rate_zero(t: Tester) -> None:
    """A step at learning rate 0 changes no weight.

    Warm-up schedules train before they should.
    """
    model = t.model()
    before = model.logprobs()
    model.step([learned()], learning_rate=0.0, weight_decay=0.5)
    expect(np.array_equal(model.logprobs(), before), "the weights moved")


@GROUP.check
def clipping(t: Tester) -> None:
    """grad_clip_norm scales the gradient down to this norm.

    Clipping, which every recipe sets, is dropped without a word.
    """
    gradient = _gradient(t, OTHER_TOKENS)
    model = t.model()
    limit = _norm(gradient) / 4
    model.forward_backward([learned(OTHER_TOKENS)]).result()
    eps = 1e6
    adam = {"learning_rate": t.rate * eps, "beta1": 0.0, "beta2": 0.0, "eps": eps, "grad_clip_norm": limit}
    model.optim_step(seq_id=None, **adam).result()
    for name, values in _second_factors(exported(t, model, "clipped")).items():
        wanted = -gradient[name] * t.rate / 4
        off = np.abs(values - wanted).max() / max(np.abs(wanted).max(), 1e-12)
        expect(off < 0.01, f"{name} moved by another amount: off by {off:.0%}")


@GROUP.check
def clipping_above_the_norm(t: Tester) -> None:
    """grad_clip_norm above the gradient's norm changes nothing.

    Steps are scaled up, or all to one size.
    """
    plain, clipped = t.model(), t.model()
    plain.step([learned()], learning_rate=0.01)
    clipped.step([learned()], learning_rate=0.01, grad_clip_norm=1e9)
    expect(np.allclose(plain.logprobs(), clipped.logprobs(), atol=1e-6), "the weights differ")


@GROUP.check
def gradients_are_cleared(t: Tester) -> None:
    """A step clears the gradient.

    Each step repeats all batches before it.
    """
    model = t.model()
    model.descend([learned()])
    before = model.logprobs()
    model.linear_step().result()
    expect(np.array_equal(model.logprobs(), before), "a step without a pass moved the weights by an old gradient")


@GROUP.check
def steps_without_a_pass(t: Tester) -> None:
    """A step without a pass before it does not fail.

    Loops that step after an empty batch stop.
    """
    t.model().optim_step(learning_rate=0.01).result()


@GROUP.check
def momentum_goes_on(t: Tester) -> None:
    """A step without a pass moves the weights by their momentum, as torch's AdamW does.

    Moments are dropped, or reset, between steps.
    """
    model = t.model()
    model.step([learned()], learning_rate=0.01)
    before = model.logprobs()
    model.optim_step(learning_rate=0.01).result()
    expect(not np.array_equal(model.logprobs(), before), "the weights stayed")


@GROUP.check
def parameters_are_of_one_step(t: Tester) -> None:
    """The parameters of a step do not carry over to the next one.

    One step of warm-up slows down all others.
    """
    plain, once = t.model(), t.model()
    for learning_rate, model in ((0.02, once), (0.01, plain)):
        model.step([learned()], learning_rate=learning_rate)
    start = once.logprobs()
    once.step([learned()], learning_rate=0.0)
    expect(np.array_equal(once.logprobs(), start), "the learning rate of the step before was used")


@GROUP.check
def reported_norm(t: Tester) -> None:
    """A norm of the gradient that a step reports is that before clipping.

    Users tune clipping by a number that means something else.
    """
    wanted = _norm(_gradient(t, OTHER_TOKENS))
    model = t.model()
    model.forward_backward([learned(OTHER_TOKENS)]).result()
    metrics = model.optim_step(grad_clip_norm=1e-3).result().get("metrics") or {}
    for name in ("grad_norm", "unclipped_grad_l2:mean"):
        if name in metrics:
            seen = float(metrics[name])
            expect(abs(seen - wanted) <= 0.01 * wanted, f"{name} is {seen:.6g}; the gradient's norm is {wanted:.6g}")


@GROUP.check
def signs_of_the_first_step(t: Tester) -> None:
    """The first step moves each weight by the learning rate, against its gradient.

    The bias of the moments is not corrected: the first steps are too small or too large.
    """
    gradient = _gradient(t, OTHER_TOKENS)
    model = t.model()
    model.step([learned(OTHER_TOKENS)], learning_rate=1e-3)
    for name, values in _second_factors(exported(t, model, "stepped")).items():
        clear = np.abs(gradient[name]) > 1e-3 * np.abs(gradient[name]).max()
        near = np.abs(values + 1e-3 * np.sign(gradient[name]))[clear] < 2e-5
        expect(near.mean() >= _KEPT, f"{name}: {near.mean():.0%} of the weights moved so")


def _trained_modules(weights: dict[str, Floats]) -> set[str]:
    return {name.split(".lora_")[0] for name in weights if ".lora_" in name}


@GROUP.each([("train_attn", "attn"), ("train_mlp", "mlp"), ("train_unembed", "head")])
def flags(t: Tester, case: tuple[str, str]) -> None:
    """With {case} alone, no other part of the model is trained.

    Adapters are larger than asked for, or train what should be frozen.
    """
    alone = {flag: flag == case[0] for flag in ("train_attn", "train_mlp", "train_unembed")}
    part = _trained_modules(exported(t, t.model(**alone), "part"))
    rest = _trained_modules(exported(t, t.model(**{flag: not on for flag, on in alone.items()}), "rest"))
    expect(part, "it trains nothing")
    expect(not part & rest, f"these are trained with and without it: {sorted(part & rest)[:3]}")


@GROUP.each([("rank 1", 1), ("rank 16", 16)])
def ranks(t: Tester, case: tuple[str, int]) -> None:
    """An adapter of {case} has it.

    Adapters are larger or smaller than asked for.
    """
    for name, values in exported(t, t.model(rank=case[1]), "rank").items():
        if ".lora_A" in name:
            expect(case[1] in values.shape, f"{name} has shape {values.shape}")


@GROUP.each(
    [
        ("a negative learning rate", {"learning_rate": -1.0}),
        ("beta1 of 1.5", {"beta1": 1.5}),
        ("a negative beta2", {"beta2": -0.1}),
        ("a negative eps", {"eps": -1e-8}),
        ("a negative weight decay", {"weight_decay": -0.1}),
        ("a negative norm", {"grad_clip_norm": -1.0}),
    ]
)
def nonsense(t: Tester, case: tuple[str, dict[str, float]]) -> None:
    """A step with {case} is refused.

    A mistake in a script diverges hours later.
    """
    model = t.model()
    body = {"model_id": model.id, "seq_id": 1, "adam_params": {**_ADAM, **case[1]}}
    t.refusal("optim_step", body)


_ADAM: Final = {"learning_rate": 1e-4, "beta1": 0.9, "beta2": 0.95, "eps": 1e-12, "weight_decay": 0.0}


@GROUP.check
def optimizers_of_other_families(t: Tester) -> None:
    """Dimuon is done or refused, not taken for Adam.

    A run trains with another optimizer than it was created with.
    """
    answer = t.new_model(optimizer_config={"type": "no-such-optimizer"})
    t.refused(answer)


@GROUP.check
def neighbours_do_not_decay(t: Tester) -> None:
    """One model's weight decay leaves another one's weights, bit for bit.

    All adapters shrink whenever somebody trains.
    """
    model: Model = t.model()
    before = model.logprobs()
    for _ in range(3):
        t.model().step([learned()], learning_rate=0.1, weight_decay=0.9)
    expect(np.array_equal(model.logprobs(), before), "the weights moved")
