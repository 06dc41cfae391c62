"""In which order requests take effect."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Final

import numpy as np

from tinsmith_conformance.data import OTHER_TOKENS, TOKENS, learned, ragged
from tinsmith_conformance.registry import Group
from tinsmith_conformance.tester import ADAM, Model, Sampler, Tester
from tinsmith_conformance.verdicts import expect, skip

GROUP: Final = Group("ordering", "In which order requests take effect.")


def _trained(t: Tester) -> Model:
    """Return a model after two steps, as others of this seed are after the same."""
    model = t.model()
    for _ in range(2):
        model.step([learned()])
    return model


@GROUP.check
def passes_see_earlier_steps(t: Tester) -> None:
    """A pass sees all steps with lower numbers.

    Training uses stale weights.
    """
    model = t.model()
    before = model.logprobs()
    model.step([learned()], learning_rate=0.05)
    expect(not np.array_equal(before, model.logprobs()), "the step changed nothing")


@GROUP.check
def passes_do_not_see_later_steps(t: Tester) -> None:
    """A pass does not see steps with higher numbers, though all are sent at once.

    Losses belong to other weights than the user asked for.
    """
    model = t.model()
    before = model.logprobs()
    passes, steps = [], []
    for _ in range(3):
        passes.append(model.forward_backward([learned()]))
        steps.append(model.optim_step(learning_rate=0.05))
    first = passes[0].result().logprobs[0]
    for each in steps:
        each.result()
    expect(np.allclose(first, before, atol=1e-6), "the first pass saw a later step")
    expect(not np.array_equal(first, passes[2].result().logprobs[0]), "the third pass did not see the steps before it")


@GROUP.check
def reversed_arrival(t: Tester) -> None:
    """Requests that arrive in reverse take effect in the order of their numbers.

    What is trained depends on the network.
    """
    wanted = _trained(t).logprobs()
    model = t.model()
    steps = [model.optim_step(seq_id=number, learning_rate=0.01) for number in (4, 2)]
    passes = [model.forward_backward([learned()], seq_id=number) for number in (3, 1)]
    for each in (*steps, *passes):
        each.result()
    model.forward_from(5)
    expect(np.array_equal(model.logprobs(), wanted), "the weights differ from those of requests in order")


@GROUP.check
def waiting_then_one_by_one(t: Tester) -> None:
    """Requests that are sent at once train as ones that wait for each other.

    Overlapping requests, as the documentation recommends, changes results.
    """
    wanted = _trained(t).logprobs()
    model = t.model()
    sent = []
    for _ in range(2):
        sent += [model.forward_backward([learned()]), model.optim_step(learning_rate=0.01)]
    for each in sent:
        each.result()
    expect(np.array_equal(model.logprobs(), wanted), "the weights differ")


@GROUP.check
def split_batches(t: Tester) -> None:
    """Parts of a batch, the first of them last, add up as the whole.

    Large batches, which the SDK splits, train another model than small ones.
    """
    data = ragged(6)
    whole, split = t.model(), t.model()
    whole.descend(data)
    parts = [split.forward_backward(data[2 * i : 2 * i + 2], seq_id=i + 1) for i in (1, 2, 0)]
    split.forward_from(4)
    split.linear_step().result()
    for each in parts:
        each.result()
    a, b = whole.logprobs(), split.logprobs()
    expect(np.allclose(a, b, atol=1e-5), f"the logprobs differ by {np.abs(a - b).max():.2g}")


@GROUP.check
def snapshots_at_their_number(t: Tester) -> None:
    """A snapshot holds the steps before it and none after it, though all are sent at once.

    Samples come from other weights than the user asked for.
    """
    model = t.model()
    wanted = model.sampler().scores()
    number = model.number()
    save = model.submit(
        "save_weights_for_sampler", seq_id=number, sampling_session_seq_id=t.sampling_number(), kind="snapshot"
    )
    model.step([learned()], learning_rate=0.1)
    scores = Sampler(t, str(save.result()["sampling_session_id"])).scores()
    expect(np.array_equal(scores, wanted), "the snapshot has weights of later")


@GROUP.check
def saves_at_their_number(t: Tester) -> None:
    """A checkpoint holds the steps before it and none after it, though all are sent at once.

    A run resumes from other weights than its name says.
    """
    model = _trained(t)
    wanted = model.logprobs()
    save = model.submit("save_weights", path="now", overwrite=False)
    model.step([learned()], learning_rate=0.1)
    resumed = t.model_from(str(save.result()["path"]), optimizer=True)
    expect(np.array_equal(resumed.logprobs(), wanted), "the checkpoint has weights of later")


@GROUP.check
def models_do_not_wait_for_each_other(t: Tester) -> None:
    """A model whose next request has not come does not hold up another model.

    One user's lost request stops everybody.
    """
    stuck, free = t.model(), t.model()
    stuck.forward_backward([learned()], seq_id=2)
    free.step([learned()])


@GROUP.check
def samples_do_not_wait_for_training(t: Tester) -> None:
    """Samples do not wait for a model whose next request has not come.

    Rollouts stop whenever training waits.
    """
    model = t.model()
    sampler = model.sampler()
    model.forward_backward([learned()], seq_id=50)
    sampler.draw()


@GROUP.check
def samples_have_no_order(t: Tester) -> None:
    """A sample does not wait for samples with lower numbers.

    A sample that was given up blocks all after it.
    """
    sampler = t.sampler()
    sampler.send({**sampler.body(), "seq_id": 7}).result()


@GROUP.check
def many_at_once(t: Tester) -> None:
    """Requests that sixteen connections send at once take effect in the order of their numbers.

    What is trained depends on the network.
    """
    wanted = t.model()
    for _ in range(4):
        wanted.step([learned()])
    model = t.model()

    def send(number: int) -> None:
        if number % 2:
            model.forward_backward([learned()], seq_id=number).result()
        else:
            model.optim_step(seq_id=number, learning_rate=0.01).result()

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(send, range(8, 0, -1)))
    model.forward_from(9)
    expect(np.array_equal(model.logprobs(), wanted.logprobs()), "the weights differ from those of requests in order")


@GROUP.check
def order_of_data_in_a_pass(t: Tester) -> None:
    """The order of the data in a batch does not change their logprobs.

    A datum's loss depends on its place.
    """
    model = t.model()
    data = ragged(4)
    forwards, backwards = model.forward(data).logprobs, model.forward(data[::-1]).logprobs[::-1]
    for a, b in zip(forwards, backwards, strict=True):
        expect(np.allclose(a, b, atol=1e-5), f"they differ by {np.abs(a - b).max():.2g}")


@GROUP.check
def company(t: Tester) -> None:
    """The company of others in a batch does not change a datum's logprobs.

    Padding or packing leaks between sequences.
    """
    model = t.model()
    alone = model.logprobs()
    packed = model.forward([learned(OTHER_TOKENS), learned(TOKENS), *ragged(3)]).logprobs[1]
    expect(np.allclose(alone, packed, atol=1e-5), f"they differ by {np.abs(alone - packed).max():.2g}")


@GROUP.check
def prefixes(t: Tester) -> None:
    """Tokens that come later do not change the logprobs of earlier ones.

    The model sees the future: losses are far too low.
    """
    model = t.model()
    long, short = model.logprobs(), model.logprobs(TOKENS[:5])
    expect(np.allclose(long[:4], short, atol=1e-5), "a longer sequence has other logprobs at its beginning")


@GROUP.check
def contexts_matter(t: Tester) -> None:
    """Tokens that came earlier change the logprobs of later ones.

    The model reads one token at a time, without its context.
    """
    model = t.model()
    ours, others = model.logprobs(), model.logprobs((OTHER_TOKENS[0], *TOKENS[1:]))
    expect(not np.allclose(ours[1:], others[1:], atol=1e-6), "another first token changes nothing after it")


@GROUP.check
def unloading(t: Tester) -> None:
    """A model that is unloaded finishes what it accepted, answers repeated questions, and takes nothing more.

    A pass is lost on the way, or a model that is done with holds its place until its session ends.
    """
    model = t.model()
    passed = model.forward_backward([learned(TOKENS)])
    response = t.http.post("unload_model", json={"model_id": model.id, "type": "unload_model"})
    if response.status_code == 404:
        skip("the server has no unload_model")
    unloaded = t.future(response)
    expect(passed.result().logprobs, "the pass before it has no result")
    expect("error" not in unloaded.result(), "it must succeed")
    expect(unloaded.id == t.ok("unload_model", {"model_id": model.id})["request_id"], "a repeat is another request")
    t.refusal("optim_step", {"model_id": model.id, "seq_id": model.number(), "adam_params": dict(ADAM)})


@GROUP.check
def unloading_of_others(t: Tester) -> None:
    """Nobody unloads the model of somebody else.

    Another tenant ends a run of yours.
    """
    model = t.model()
    before = model.logprobs()
    t.other().refusal("unload_model", {"model_id": model.id}, 403, 404)
    expect(np.array_equal(model.logprobs(), before), "the model is another one")
