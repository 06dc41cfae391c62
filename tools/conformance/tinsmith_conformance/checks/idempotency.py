"""What happens to requests that come twice."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from typing import Any, Final

import numpy as np

from tinsmith_conformance.data import OTHER_TOKENS, learned
from tinsmith_conformance.registry import Group
from tinsmith_conformance.tester import Future, Model, Sampler, Tester
from tinsmith_conformance.verdicts import expect

GROUP: Final = Group("idempotency", "What happens to requests that come twice, as after a lost answer.")


@GROUP.check
def sessions(t: Tester) -> None:
    """A session is made once for an idempotency key.

    Each lost answer leaks a session.
    """
    body = {"tags": [], "user_metadata": {}, "sdk_version": "0.38.0", "type": "create_session"}
    key = {"X-Idempotency-Key": f"stainless-python-retry-{uuid.uuid4()}"}
    first, again = (t.http.post("create_session", json=body, headers=key).json()["session_id"] for _ in range(2))
    expect(first == again, "the repeat made another session")


@GROUP.check
def models(t: Tester) -> None:
    """A model is made once for its session and number.

    Each lost answer leaks a model, and its memory.
    """
    fields: dict[str, Any] = {"model_seq_id": 7}
    first, again = (t.new_model(**fields) for _ in range(2))
    expect(first.is_success and again.is_success, f"status {first.status_code}, then {again.status_code}")
    expect(Future(t, first.json()).result() == Future(t, again.json()).result(), "the repeat made another model")


def _passed(model: Model, number: int) -> Future:
    return model.forward_backward([learned()], seq_id=number)


_SUBMITS: Final[list[tuple[str, Callable[[Model, int], Future]]]] = [
    ("forward_backward", _passed),
    ("optim_step", lambda model, number: model.optim_step(seq_id=number)),
    ("save_weights", lambda model, number: model.submit("save_weights", seq_id=number, path="a", overwrite=False)),
    (
        "save_weights_for_sampler",
        lambda model, number: model.submit("save_weights_for_sampler", seq_id=number, path="a", kind="snapshot"),
    ),
    ("save_weights_external", lambda model, number: model.submit("save_weights_external", seq_id=number, path="a")),
]


@GROUP.each(_SUBMITS)
def submits(t: Tester, case: tuple[str, Callable[[Model, int], Future]]) -> None:
    """{case} with the same number is one request.

    A lost answer makes the server do it twice.
    """
    model = t.model()
    first, again = (case[1](model, 1) for _ in range(2))
    expect(first.id == again.id, "the repeat is another request")
    first.result()
    again.result()


@GROUP.each(_SUBMITS)
def submits_that_are_done(t: Tester, case: tuple[str, Callable[[Model, int], Future]]) -> None:
    """{case} with the number of one that is done is the same request.

    A client that comes back from a long break repeats what it had done.
    """
    model = t.model()
    first = case[1](model, 1)
    first.result()
    expect(case[1](model, 1).id == first.id, "the repeat is another request")


@GROUP.check
def keys_of_http_do_not_matter(t: Tester) -> None:
    """Repeats of a pass with another X-Idempotency-Key are one request.

    The SDK changes this key when it repeats after a minute: the gradient counts twice.
    """
    model = t.model()
    body = model.pass_body([learned()], seq_id=1)
    ids = {model.send_pass(body, {"X-Idempotency-Key": str(uuid.uuid4())}).json().get("request_id") for _ in range(3)}
    expect(len(ids) == 1, f"three repeats are {len(ids)} requests")


@GROUP.check
def gradients_count_once(t: Tester) -> None:
    """A pass that comes three times counts once in the gradient.

    Steps are too large after each lost answer.
    """
    once, thrice = t.model(), t.model()
    once.descend([learned()])
    for _ in range(3):
        thrice.forward_backward([learned()], seq_id=1).result()
    thrice.linear_step(seq_id=2).result()
    thrice.forward_from(3)
    expect(np.array_equal(once.logprobs(), thrice.logprobs()), "the weights differ")


@GROUP.check
def steps_count_once(t: Tester) -> None:
    """A step that comes three times is taken once.

    Training moves on without data after each lost answer.
    """
    once, thrice = t.model(), t.model()
    once.step([learned()])
    thrice.forward_backward([learned()], seq_id=1).result()
    for _ in range(3):
        thrice.optim_step(seq_id=2, learning_rate=0.01).result()
    thrice.forward_from(3)
    expect(np.array_equal(once.logprobs(), thrice.logprobs()), "the weights differ")


@GROUP.check
def ephemeral_saves(t: Tester) -> None:
    """An ephemeral save may come again with another number of its sampling session.

    The SDK counts this number up at each try: after a lost answer, no sampler is made.
    """
    model = t.model()
    first, again = (
        model.submit("save_weights_for_sampler", seq_id=1, sampling_session_seq_id=number, kind="snapshot")
        for number in (0, 1)
    )
    a, b = (each.result()["sampling_session_id"] for each in (first, again))
    expect(a == b, "the repeat made another sampler")
    Sampler(t, str(a)).draw()


@GROUP.check
def sampling_sessions(t: Tester) -> None:
    """A sampling session is made once for its session and number.

    Each lost answer leaks a sampler.
    """
    body = {"session_id": t.session, "sampling_session_seq_id": 3, "base_model": t.target.model}
    first, again = (t.ok("create_sampling_session", body)["sampling_session_id"] for _ in range(2))
    expect(first == again, "the repeat made another sampling session")


@GROUP.check
def samples(t: Tester) -> None:
    """A sample that comes again is one request, with the same sequence ids.

    A lost answer costs a sample, and training on sequence ids fails.
    """
    sampler = t.sampler()
    body = sampler.body(n=2)
    first, again = (sampler.send(body) for _ in range(2))
    expect(first.submitted == again.submitted, f"{first.submitted}, then {again.submitted}")


@GROUP.check
def samples_without_a_seed(t: Tester) -> None:
    """A sample without a seed that comes again has the same tokens.

    After a lost answer, the tokens are not those whose logprobs are known.
    """
    sampler = t.sampler()
    body = sampler.body(max_tokens=8)
    first = sampler.send(body).finished().content
    expect(sampler.send(body).finished().content == first, "the repeat drew other tokens")


@GROUP.check
def other_content(t: Tester) -> None:
    """A number that comes again with other content is refused, and not answered with 409.

    A bug in a client trains on something else than was sent, or the SDK repeats for five minutes.
    """
    model = t.model()
    model.forward_backward([learned()], seq_id=1).result()
    t.refused(model.send_pass(model.pass_body([learned(OTHER_TOKENS)], seq_id=1)), 400, 422)


@GROUP.check
def other_call(t: Tester) -> None:
    """A number that comes again with another call is refused.

    A step is taken for the answer of a pass.
    """
    model = t.model()
    model.forward_backward([learned()], seq_id=1).result()
    body = {"model_id": model.id, "seq_id": 1, "adam_params": {"learning_rate": 0.1}}
    t.refusal("optim_step", body, 400, 422)


@GROUP.check
def other_samples(t: Tester) -> None:
    """A sample's number that comes again with another prompt is refused.

    The answer belongs to another prompt.
    """
    sampler = t.sampler()
    body = sampler.body()
    sampler.send(body).result()
    other = {**body, "prompt": {"chunks": [{"type": "encoded_text", "tokens": [1, 2]}]}}
    t.refusal("asample", other, 400, 422)


@GROUP.check
def loads(t: Tester) -> None:
    """A model is made once from a checkpoint, for its session and number.

    Each lost answer leaks a model.
    """
    path = t.model().save()
    body = {"session_id": t.session, "model_seq_id": 9, "path": path, "optimizer": True}
    first, again = (Future(t, t.ok("load_weights", body)) for _ in range(2))
    expect(first.id == again.id, "the repeat is another request")
    first.result()


@GROUP.check
def finished_polls(t: Tester) -> None:
    """A future that nobody issued is refused at once, and not held.

    A client with a wrong id waits for ever.
    """
    response = t.http.post("retrieve_future", json={"request_id": "nobody-issued-this", "allow_metadata_only": True})
    expect(response.status_code in (400, 403, 404, 410, 422), f"status {response.status_code}")
    expect(response.content, "the body is empty")
