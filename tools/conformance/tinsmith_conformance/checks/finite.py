"""What happens to numbers that are not finite."""

from __future__ import annotations

import json
from contextlib import suppress
from typing import Final

import numpy as np

from tinsmith_conformance.data import TOKENS, Sequence, learned, rewarded
from tinsmith_conformance.registry import Group
from tinsmith_conformance.tester import ADAM, Model, Tester
from tinsmith_conformance.verdicts import RequestFailedError, expect

GROUP: Final = Group("finite", "What happens to numbers that are not finite.")

_HUGE: Final = 3e38
_N: Final = len(TOKENS) - 1


@GROUP.each([("NaN", float("nan")), ("infinite", float("inf")), ("minus infinite", float("-inf"))])
def inputs(t: Tester, case: tuple[str, float]) -> None:
    """Weights that are {case} are refused.

    One bad number turns a model into NaN.
    """
    model = t.model()
    body = model.pass_body([learned(weights=[case[1]] * _N)], seq_id=model.number())
    t.refused(model.send_pass(body))


@GROUP.each(["advantages", "logprobs"])
def rl_inputs(t: Tester, case: str) -> None:
    """Not finite {case} are refused.

    One bad reward turns a model into NaN.
    """
    model = t.model()
    whole = rewarded(np.full(_N, -1.0))
    bad = Sequence(whole.tokens, {**whole.inputs, case: np.full(_N, np.nan)})
    t.refused(model.send_pass(model.pass_body([bad], "importance_sampling", seq_id=model.number())))


def _overflowed(model: Model) -> str:
    """Send a pass whose gradient is larger than float32 holds, and a step. Return how the step fails, or nothing."""
    with suppress(RequestFailedError):
        model.forward_backward([learned(weights=_HUGE), learned(weights=_HUGE)]).result()
    try:
        model.optim_step(learning_rate=0.01).result()
    except RequestFailedError as error:
        return error.message
    return ""


@GROUP.check
def overflow_changes_nothing(t: Tester) -> None:
    """A step whose gradient is not finite leaves the weights as they are.

    One bad batch ends a run: every later loss is NaN.
    """
    model = t.model()
    before = model.logprobs()
    _overflowed(model)
    expect(np.array_equal(model.logprobs(), before), "the weights moved")


@GROUP.check
def overflow_is_told(t: Tester) -> None:
    """A step whose gradient is not finite fails, and says why.

    Training seems to go on while nothing is learned.
    """
    expect(_overflowed(t.model()), "it succeeded")


@GROUP.check
def overflow_leaves_moments(t: Tester) -> None:
    """After a step whose gradient was not finite, training goes on as if it had not been.

    The optimizer remembers NaN.
    """
    model, clean = t.model(), t.model()
    for each in (model, clean):
        each.step([learned()])
    _overflowed(model)
    for each in (model, clean):
        each.step([learned()])
    expect(np.array_equal(model.logprobs(), clean.logprobs()), "the weights differ from those of a run without it")


@GROUP.check
def overflow_is_private(t: Tester) -> None:
    """Another model is not touched by it.

    One user's NaN reaches all users.
    """
    other = t.model()
    before = other.logprobs()
    _overflowed(t.model())
    expect(np.array_equal(other.logprobs(), before), "the other model's logprobs changed")
    fresh = t.model()
    expect(np.array_equal(fresh.logprobs(), before), "a new model has other logprobs")


@GROUP.check
def overflow_is_strict_json(t: Tester) -> None:
    """The answer to such a step is JSON without NaN.

    The SDK cannot read it, and raises a parse error.
    """
    model = t.model()
    model.forward_backward([learned(weights=_HUGE)]).finished()
    text = model.optim_step().finished().text

    def refuse(name: str) -> float:
        expect(False, f"the answer holds {name}: {text[:200]}")  # noqa: FBT003 - it is never reached
        return 0.0

    json.loads(text, parse_constant=refuse)


@GROUP.check
def passes_that_are_not_finite(t: Tester) -> None:
    """A pass whose loss is not finite is answered.

    The server cannot encode it, answers 500, and the SDK repeats it without end.
    """
    model = t.model()
    model.forward_backward([learned(weights=[_HUGE] * _N)]).finished()


@GROUP.each(["learning_rate", "beta1", "eps"])
def parameters(t: Tester, case: str) -> None:
    """A step with NaN as {case}, which the SDK sends as null, is refused.

    A default is taken for it, and nobody notices.
    """
    model = t.model()
    t.refusal("optim_step", {"model_id": model.id, "seq_id": 1, "adam_params": {**ADAM, case: None}})


@GROUP.check
def temperature(t: Tester) -> None:
    """A temperature of NaN is refused.

    Tokens are drawn from nothing.
    """
    sampler = t.sampler()
    body = sampler.body()
    body["sampling_params"]["temperature"] = None
    answer = t.http.post("asample", json=body)
    if answer.is_success:  # null may also count as absent
        sampler.send(body).result()
    else:
        t.refused(answer)


def _diverged(t: Tester) -> Model:
    model = t.model()
    try:
        for _ in range(3):
            model.step([learned()], learning_rate=1e30)
    except RequestFailedError:
        pass
    return model


@GROUP.check
def diverged_models_answer(t: Tester) -> None:
    """A model with enormous weights answers passes, by numbers or by a failure.

    A learning rate with a typing error takes the server down.
    """
    model = _diverged(t)
    model.forward_backward([learned()], forward_only=True).finished()


@GROUP.check
def diverged_models_are_alone(t: Tester) -> None:
    """A model with enormous weights does not change another one, bit for bit.

    One user's divergence reaches all users.
    """
    other = t.model()
    before = other.logprobs()
    _diverged(t)
    expect(np.array_equal(other.logprobs(), before), "the other model's logprobs changed")


@GROUP.check
def diverged_samplers_answer(t: Tester) -> None:
    """Sampling from a model with enormous weights ends, with tokens or a failure.

    Sampling hangs, or takes the server down.
    """
    model = _diverged(t)
    try:
        model.sampler().draw(max_tokens=2)
    except RequestFailedError as error:
        expect(error.message, "the failure says nothing")
