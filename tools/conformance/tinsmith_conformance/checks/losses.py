"""Losses and their gradients, against float64."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import httpx
import numpy as np
from tinker.proto import tinker_public_pb2 as pb

from tinsmith_conformance import oracle
from tinsmith_conformance.data import OTHER_TOKENS, TOKENS, Sequence, learned, ragged, rewarded
from tinsmith_conformance.oracle import Floats
from tinsmith_conformance.registry import Group
from tinsmith_conformance.tester import PROTOBUF, Model, Tester, floats, tokens_of
from tinsmith_conformance.verdicts import RequestFailedError, expect, skip

GROUP: Final = Group("losses", "Losses and their gradients against float64, through LoRA training.")

_CLIPS: Final = {"clip_low_threshold": 0.9, "clip_high_threshold": 1.1}
_CONFIGS: Final[Mapping[str, Mapping[str, float]]] = {
    "importance_sampling": {},
    "ppo": _CLIPS,
    "cispo": _CLIPS,
    "dro": {"beta": 0.1},
    "gspo": _CLIPS,
}
_STABLE: Final = "stable_reinforce"
_N: Final = len(TOKENS) - 1
_SHIFTS: Final = np.array([0.0, 0.3, -0.3, 0.05, -0.05, 0.8, -0.8])
_ADVANTAGES: Final = np.array([1.0, 1.0, 1.0, -0.5, 2.0, -1.0, -1.0])
_MASK: Final = np.array([0.0, 1.0, 1.0, 1.0, 1.0, 1.0, 0.0])


def _close(seen: float, wanted: float, what: str, tolerance: float = 2e-5) -> None:
    allowed = tolerance * max(1.0, abs(wanted))
    expect(abs(seen - wanted) <= allowed, f"{what} is {seen:.8g}; float64 says {wanted:.8g}")


def _same(a: Floats, b: Floats, what: str, tolerance: float = 1e-5) -> None:
    expect(np.allclose(a, b, atol=tolerance), f"{what} differ by {np.abs(a - b).max():.2g}")


def _moved(model: Model, data: list[Sequence]) -> Floats:
    """Return how far plain gradient descent on the data moves the logprobs. Twice, so that both LoRA factors count."""
    before = model.logprobs()
    for _ in range(2):
        model.descend(data)
    moved = model.logprobs() - before
    expect(np.abs(moved).max() > 1e-4, f"gradient descent moved the logprobs by {np.abs(moved).max():.2g} only")
    return moved


def _same_moves(a: Floats, b: Floats, what: str) -> None:
    allowed = 2e-3 * np.abs(b).max() + 2e-6
    expect(np.abs(a - b).max() <= allowed, f"{what}: the logprobs moved by {a.round(6)}, and must by {b.round(6)}")


def _rl(loss: str, model: Model) -> tuple[Sequence, oracle.Loss]:
    """Return data whose ratios lie on both sides of the clips, and what float64 says of them."""
    logprobs = model.logprobs()
    mask = _MASK if loss == "gspo" else None
    data = rewarded(logprobs - _SHIFTS, _ADVANTAGES, mask=mask)
    try:
        seen = model.forward([data], loss, **_CONFIGS[loss]).logprobs[0]
    except RequestFailedError as error:
        skip(f"{loss} is not offered: {error.message}")
    sent = (np.float32(logprobs - _SHIFTS)).astype(np.float64)
    return data, oracle.RL[loss](seen, sent, _ADVANTAGES, _CONFIGS[loss], _MASK)


@GROUP.check
def cross_entropy(t: Tester) -> None:
    """The loss of cross_entropy is minus the sum of weight times logprob.

    Reported losses differ from the documentation.
    """
    output = t.model().forward([learned()])
    _close(output.loss, -output.logprobs[0].sum(), "the loss")


@GROUP.each([("fractions", 0.25), ("negative weights", -1.0), ("zero weights", 0.0), ("large weights", 100.0)])
def weights(t: Tester, case: tuple[str, float]) -> None:
    """cross_entropy takes {case} as they are.

    Weighted losses, and forward_backward_custom, which sends negative weights, are wrong.
    """
    values = np.linspace(case[1], case[1] * 2, _N)
    output = t.model().forward([learned(weights=values.tolist())])
    _close(output.loss, -(np.float32(values) * output.logprobs[0]).sum(), "the loss")


@GROUP.check
def sums_over_data(t: Tester) -> None:
    """The loss of a batch is the sum over its data, not their mean.

    Learning rates of recipes do not fit this server.
    """
    output = t.model().forward(ragged(5))
    _close(output.loss, -sum(each.sum() for each in output.logprobs), "the loss")


@GROUP.check
def logprobs_of_zero_weights(t: Tester) -> None:
    """Positions with weight 0 have logprobs.

    forward_backward_custom, which asks with weights of 0, sees nothing.
    """
    model = t.model()
    expect(np.array_equal(model.forward([learned(weights=0.0)]).logprobs[0], model.logprobs()), "they are others")


@GROUP.check
def logprobs_are_logprobs(t: Tester) -> None:
    """Logprobs are finite and below zero.

    What is reported as logprobs is something else.
    """
    values = t.model().logprobs()
    expect(np.isfinite(values).all() and (values < 0).all(), f"they are {values}")


@GROUP.check
def probabilities_sum_to_one(t: Tester) -> None:
    """The probabilities of many next tokens sum to at most one.

    Logprobs are not normalised: losses of tokens cannot be compared.
    """
    model = t.model()
    data = [learned((*TOKENS[:3], token)) for token in range(1, 41)]
    total = sum(np.exp(each[-1]) for each in model.forward(data).logprobs)
    expect(0 < total <= 1.0001, f"forty tokens have probability {total:.4f}")


@GROUP.check
def forward_leaves_no_gradient(t: Tester) -> None:
    """A forward pass leaves no gradient.

    Evaluations train the model.
    """
    plain, evaluated = t.model(), t.model()
    plain.descend([learned()])
    evaluated.forward_backward([learned()]).result()
    evaluated.forward([learned(OTHER_TOKENS)])
    evaluated.linear_step().result()
    _same(plain.logprobs(), evaluated.logprobs(), "logprobs")


@GROUP.check
def training_lowers_the_loss(t: Tester) -> None:
    """Training on a sequence lowers its loss.

    Nothing is learned, or the gradient has the wrong sign.
    """
    model = t.model()
    before = model.forward([learned()]).loss
    for _ in range(5):
        model.step([learned()], learning_rate=0.02)
    after = model.forward([learned()]).loss
    expect(after < before, f"after five steps it is {after:.5g}; it was {before:.5g}")


@GROUP.check
def gradients_scale(t: Tester) -> None:
    """Weights of two give a gradient twice as large.

    Gradients are normalised: weights have no meaning, and clipping another one.
    """
    single, double = t.model(), t.model()
    before = single.logprobs()
    single.descend([learned()])
    double.descend([learned(weights=2.0)], scale=0.5)
    _same_moves(double.logprobs() - before, single.logprobs() - before, "twice the weight at half the rate")


@GROUP.check
def gradients_add_up(t: Tester) -> None:
    """Two passes before a step add up to one with the data of both.

    Gradient accumulation trains another model.
    """
    together, apart, last = t.model(), t.model(), t.model()
    data = [learned(), learned(OTHER_TOKENS)]
    before = together.logprobs()
    together.descend(data)
    apart.forward_backward(data[:1]).result()
    apart.descend(data[1:])
    last.descend(data[1:])
    _same_moves(apart.logprobs() - before, together.logprobs() - before, "passes apart")
    expect(not np.allclose(apart.logprobs(), last.logprobs(), atol=1e-4), "the second pass alone has the same gradient")


@GROUP.check
def zero_weights_do_not_dilute(t: Tester) -> None:
    """Data with weights of 0 do not change the gradient of others.

    The size of a batch's padding changes the learning rate.
    """
    alone, diluted = t.model(), t.model()
    a = _moved(alone, [learned()])
    b = _moved(diluted, [learned(), learned(OTHER_TOKENS, 0.0), learned(OTHER_TOKENS, 0.0)])
    _same_moves(b, a, "with data of weight 0")


@GROUP.check
def zero_weights_give_no_gradient(t: Tester) -> None:
    """A pass whose weights are all 0 gives a gradient of 0.

    Prompts, which have weight 0, are learned.
    """
    model = t.model()
    before = model.logprobs()
    model.descend([learned(weights=0.0)])
    expect(np.array_equal(model.logprobs(), before), "the weights moved")


@GROUP.check
def opposite_weights_cancel(t: Tester) -> None:
    """A sequence with weight 1 and again with -1 gives no gradient.

    forward_backward_custom and pairwise losses, whose weights sum to 0, explode.
    """
    model = t.model()
    before = model.logprobs()
    model.descend([learned(), learned(weights=-1.0)])
    moved = np.abs(model.logprobs() - before).max()
    expect(moved < 1e-4, f"the logprobs moved by {moved:.2g}")


@GROUP.check
def symmetric_influence(t: Tester) -> None:
    """Training on one sequence changes another's loss as the reverse does.

    What is called a gradient is none: it has no potential.
    """
    first, second = t.model(), t.model()
    a, b = [learned()], [learned(OTHER_TOKENS)]
    loss_a, loss_b = first.forward(a).loss, first.forward(b).loss
    first.descend(a, scale=0.1)
    second.descend(b, scale=0.1)
    by_a, by_b = first.forward(b).loss - loss_b, second.forward(a).loss - loss_a
    allowed = 0.1 * max(abs(by_a), abs(by_b)) + 2e-5
    expect(abs(by_a - by_b) <= allowed, f"the changes are {by_a:.6g} and {by_b:.6g}")


@GROUP.check
def finite_difference(t: Tester) -> None:
    """A small step lowers the loss by its size times the gradient's square.

    The gradient that is reported is not the loss's.
    """
    model = t.model()
    before = model.forward([learned()]).loss
    model.forward_backward([learned()]).result()
    metrics = model.linear_step(0.1).result().get("metrics") or {}
    norm = metrics.get("unclipped_grad_l2:mean", metrics.get("grad_norm"))
    if norm is None:
        skip("steps report no norm of their gradient")
    change, wanted = before - model.forward([learned()]).loss, 0.1 * t.rate * float(str(norm)) ** 2
    expect(abs(change - wanted) <= 0.1 * wanted + 2e-5, f"the loss fell by {change:.6g}; it should by {wanted:.6g}")


@GROUP.each(list(_CONFIGS))
def values_of_rl(t: Tester, case: str) -> None:
    """The value of {case} equals its formula in float64.

    Another loss is computed than the one that was asked for.
    """
    model = t.model()
    data, wanted = _rl(case, model)
    _close(model.forward([data], case, **_CONFIGS[case]).loss, wanted.value, "the loss")


@GROUP.each(list(_CONFIGS))
def gradients_of_rl(t: Tester, case: str) -> None:
    """The gradient of {case} equals its formula's in float64.

    Reinforcement learning optimises something else than it reports.
    """
    model = t.model()
    data, wanted = _rl(case, model)
    before = model.logprobs()
    model.descend([data], case, _CONFIGS[case])
    same = t.model()
    same.descend([learned(weights=(-wanted.by_logprobs).tolist())])
    _same_moves(model.logprobs() - before, same.logprobs() - before, f"a step of {case}")


@GROUP.each(["importance_sampling", "ppo", "cispo"])
def on_policy(t: Tester, case: str) -> None:
    """At ratios of 1, the gradient of {case} equals weighted cross entropy's.

    The first step of each iteration goes another way.
    """
    model, same = t.model(), t.model()
    before = model.logprobs()
    model.descend([rewarded(before, _ADVANTAGES)], case, {})
    same.descend([learned(weights=_ADVANTAGES.tolist())])
    _same_moves(model.logprobs() - before, same.logprobs() - before, f"a step of {case}")


@GROUP.each([("ppo", 0.8, 1.2), ("cispo", 0.0, 4.0)])
def default_clips(t: Tester, case: tuple[str, float, float]) -> None:
    """{case} clips at its documented thresholds if none are sent.

    Runs with default settings clip elsewhere.
    """
    model = t.model()
    logprobs = model.logprobs()
    shifts = np.linspace(-2, 2, _N)
    output = model.forward([rewarded(logprobs - shifts, _ADVANTAGES)], case[0])
    sent = np.float32(logprobs - shifts).astype(np.float64)
    config = {"clip_low_threshold": case[1], "clip_high_threshold": case[2]}
    wanted = oracle.RL[case[0]](output.logprobs[0], sent, _ADVANTAGES, config, _MASK)
    _close(output.loss, wanted.value, "the loss")


@GROUP.check
def importance_sampling_is_not_clipped(t: Tester) -> None:
    """importance_sampling does not clip large ratios.

    It is ppo under another name.
    """
    model = t.model()
    logprobs = model.logprobs()
    output = model.forward([rewarded(logprobs - 3.0)], "importance_sampling")
    _close(output.loss, -_N * float(np.exp(3.0)), "the loss", 1e-4)


@GROUP.check
def losses_do_not_mix(t: Tester) -> None:
    """Passes with two losses before one step each use their own.

    Passes that wait together are merged, and the second is computed with the loss of the first.
    """
    model, apart = t.model(), t.model()
    logprobs = model.logprobs()
    rl = [rewarded(logprobs - _SHIFTS, _ADVANTAGES)]
    first = model.forward_backward([learned()])
    second = model.forward_backward(rl, "ppo")
    wanted = apart.forward(rl, "ppo").loss
    _close(second.result().loss, wanted, "the loss of the second pass")
    _close(first.result().loss, -logprobs.sum(), "the loss of the first pass")


@GROUP.check
def many_targets(t: Tester) -> None:
    """cross_entropy with several targets per token is the weighted sum of their logprobs.

    Distillation trains on one of the teacher's tokens.
    """
    model = t.model()
    targets = np.stack([np.asarray(TOKENS[1:]), np.asarray(OTHER_TOKENS[1:])], axis=1)
    weights_TK = np.stack([np.full(_N, 0.75), np.full(_N, 0.25)], axis=1)
    data = Sequence(TOKENS[:-1], {"target_tokens": targets, "weights": weights_TK})
    try:
        output = model.forward([data])
    except RequestFailedError as error:
        skip(f"one target per token alone: {error.message}")
    _close(output.loss, -(weights_TK * output.logprobs[0]).sum(), "the loss")
    _same(output.logprobs[0][:, 0], model.logprobs(), "logprobs of the first target")


@GROUP.each([("an unknown loss", "no_such_loss", {}), ("an unknown setting", "ppo", {"no_such_setting": 1.0})])
def unknown(t: Tester, case: tuple[str, str, dict[str, Any]]) -> None:
    """{case} is refused by name.

    A misspelt loss silently trains with another.
    """
    model = t.model()
    body = model.pass_body([rewarded(np.zeros(_N))], case[1], case[2], seq_id=model.number())
    words = t.refused(model.send_pass(body))
    name = next(iter(case[2]), case[1])
    expect(name in words, f"the refusal does not name '{name}': {words}")


@GROUP.each(["logprobs", "advantages", "target_tokens"])
def missing_inputs(t: Tester, case: str) -> None:
    """importance_sampling without {case} is refused by name.

    A forgotten input counts as zero, and nothing is learned.
    """
    model = t.model()
    whole = rewarded(np.zeros(_N))
    part = Sequence(whole.tokens, {name: value for name, value in whole.inputs.items() if name != case})
    body = model.pass_body([part], "importance_sampling", seq_id=model.number())
    words = t.refused(model.send_pass(body))
    expect(case in words, f"the refusal does not name it: {words}")


@GROUP.check
def unequal_lengths(t: Tester) -> None:
    """Inputs of other lengths than the tokens are refused.

    Weights are applied to the wrong tokens.
    """
    model = t.model()
    whole = learned()
    short = Sequence(whole.tokens, {**whole.inputs, "weights": np.ones(2)})
    t.refused(model.send_pass(model.pass_body([short], seq_id=model.number())))


@GROUP.check
def inputs_of_other_losses(t: Tester) -> None:
    """Inputs that a loss does not have are refused.

    Advantages that are sent to cross_entropy are ignored, and every sample is learned alike.
    """
    model = t.model()
    whole = learned()
    more = Sequence(whole.tokens, {**whole.inputs, "advantages": np.ones(_N)})
    t.refused(model.send_pass(model.pass_body([more], seq_id=model.number())))


@GROUP.check
def recorded_sequences(t: Tester) -> None:
    """stable_reinforce trains on sequences that its user had recorded, or is refused by name.

    Runs with the cookbook's default loss fail after the first rollout, or train on what nobody sampled.
    """
    model, sampler = t.model(), t.sampler()
    request = sampler.body(TOKENS[:4], max_tokens=4, _record_stability_info=True)
    answer = t.http.post("asample", json=request)
    if not answer.is_success:
        words = t.refused(answer)
        expect("record_stability_info" in words, f"the refusal does not name it: {words}")
        return
    mine = t.future(answer).submitted["sample_sequence_ids"][0]
    sampled = sampler.send(request).result().sequences[0]
    whole = [*TOKENS[:4], *tokens_of(sampled)]
    logprobs = [0.0] * 3 + floats(sampled.logprobs).tolist()
    sequence = rewarded(logprobs, [0.0] * 3 + [1.0] * (len(whole) - 4), whole)

    def send(number: int, name: str) -> httpx.Response:
        message = pb.ForwardBackwardRequest.FromString(model.pass_body([sequence], _STABLE, seq_id=number))
        for spans, first, sampled_tokens in (
            (message.data[0].model_input_spans, 0, len(whole) - 5),
            (message.data[0].loss_fn_input_spans, 1, len(whole) - 4),
        ):
            prompt, drawn = spans.add().prompt_tokens, spans.add().sampled_tokens
            prompt.sequence_id, prompt.offset, prompt.length = name, first, 4 - first
            drawn.sequence_id, drawn.length = name, sampled_tokens
        return model.send_pass(message.SerializeToString())

    trained = t.future(send(model.number(), mine)).finished()
    expect(PROTOBUF in trained.headers.get("content-type", ""), f"a pass over them fails: {trained.text[:300]}")
    other = t.other().sampler()
    theirs = other.send(other.body(TOKENS[:4], _record_stability_info=True)).submitted["sample_sequence_ids"][0]
    for name in (theirs, "no-such-sequence"):
        words = t.refused(send(model.number(), name))
        expect(name in words, f"the refusal does not name it: {words}")
