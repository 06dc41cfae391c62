"""What happens to a step when a pass of its window failed."""

from __future__ import annotations

from typing import Final

import numpy as np

from tinsmith_conformance.data import Sequence, learned
from tinsmith_conformance.registry import Group
from tinsmith_conformance.tester import Model, Tester
from tinsmith_conformance.verdicts import RequestFailedError, expect

GROUP: Final = Group("poisoned", "What happens to a step when a pass before it failed.")

UNKNOWN: Final = 2**31 - 1  # a token that no model has


def _wrong() -> Sequence:
    return learned([1, 2, UNKNOWN, 3])


def _fails(t: Tester, model: Model, data: list[Sequence]) -> str:
    number = model.number()
    return t.refused(model.send_pass(model.pass_body(data, seq_id=number)))


def _poisoned(t: Tester) -> Model:
    """Return a model with a good pass and a failed one, and no step yet."""
    model = t.model()
    model.forward_backward([learned()]).result()
    _fails(t, model, [_wrong()])
    return model


def _try_to_step(model: Model) -> bool:
    try:
        model.optim_step(learning_rate=0.05).result()
    except RequestFailedError:
        return False
    return True


@GROUP.check
def failed_pass_is_an_answer(t: Tester) -> None:
    """A pass with a token that the model does not have fails with category 'user'.

    The SDK repeats it for five minutes, or the model returns NaN.
    """
    _fails(t, t.model(), [_wrong()])


@GROUP.check
def failure_names_the_token(t: Tester) -> None:
    """The failure names the token that the model does not have.

    The user looks for the wrong datum among thousands.
    """
    words = _fails(t, t.model(), [_wrong()])
    expect(str(UNKNOWN) in words, f"the words are: {words}")


@GROUP.check
def no_partial_step(t: Tester) -> None:
    """A step after a failed pass applies no part of its batch.

    A batch that the SDK split is applied in part, and nobody notices.
    """
    model = _poisoned(t)
    before = model.logprobs()
    _try_to_step(model)
    expect(np.array_equal(model.logprobs(), before), "the step applied what was left of the batch")


@GROUP.check
def step_says_so(t: Tester) -> None:
    """A step after a failed pass fails.

    Training seems to go on while nothing is learned.
    """
    expect(not _try_to_step(_poisoned(t)), "it succeeded")


@GROUP.check
def next_window(t: Tester) -> None:
    """After a failed window, training goes on as if it had not been.

    One bad batch ends a run of days.
    """
    model, clean = _poisoned(t), t.model()
    _try_to_step(model)
    for each in (model, clean):
        each.step([learned()])
    expect(np.array_equal(model.logprobs(), clean.logprobs()), "the weights differ from those of a run without it")


@GROUP.check
def gradient_is_dropped(t: Tester) -> None:
    """The gradient of a failed window does not count in the next one.

    Half a batch is applied one step later.
    """
    model, clean = _poisoned(t), t.model()
    _try_to_step(model)
    for each in (model, clean):
        each.descend([learned()])
    expect(np.allclose(model.logprobs(), clean.logprobs(), atol=1e-6), "it does")


@GROUP.check
def moments_stay(t: Tester) -> None:
    """A failed window leaves the optimizer's moments as they are.

    Later steps have other sizes and directions.
    """
    model, clean = t.model(), t.model()
    for each in (model, clean):
        each.step([learned()])
    _fails(t, model, [_wrong()])
    _try_to_step(model)
    for each in (model, clean):
        each.step([learned()])
    expect(np.array_equal(model.logprobs(), clean.logprobs()), "the weights differ from those of a run without it")


@GROUP.check
def forward_does_not_poison(t: Tester) -> None:
    """A failed forward does not fail the next step.

    An evaluation with a bad datum costs a step of training.
    """
    model = t.model()
    model.forward_backward([learned()]).result()
    number = model.number()
    t.refused(model.send_pass(model.pass_body([_wrong()], seq_id=number, forward_only=True)))
    expect(_try_to_step(model), "the step failed")


@GROUP.check
def failed_pass_first(t: Tester) -> None:
    """A window is discarded though its good pass came after the failed one.

    A batch is applied in part, by the order of its parts.
    """
    model = t.model()
    before = model.logprobs()
    _fails(t, model, [_wrong()])
    model.forward_backward([learned()]).result()
    _try_to_step(model)
    expect(np.array_equal(model.logprobs(), before), "the step applied what was left of the batch")


@GROUP.check
def one_bad_datum(t: Tester) -> None:
    """A bad datum among good ones leaves no gradient of the good ones.

    Half a request is applied.
    """
    model = t.model()
    before = model.logprobs()
    _fails(t, model, [learned(), _wrong(), learned()])
    _try_to_step(model)
    expect(np.array_equal(model.logprobs(), before), "the good data changed the weights")


@GROUP.check
def saves_still_work(t: Tester) -> None:
    """A checkpoint can be saved after a failed window.

    A run cannot even be saved after one bad batch.
    """
    model = _poisoned(t)
    _try_to_step(model)
    model.save()


@GROUP.check
def others_are_not_poisoned(t: Tester) -> None:
    """A failed pass of one model does not fail the step of another.

    One user's bad datum costs others a step.
    """
    other = t.model()
    other.forward_backward([learned()]).result()
    _poisoned(t)
    expect(_try_to_step(other), "the other model's step failed")
