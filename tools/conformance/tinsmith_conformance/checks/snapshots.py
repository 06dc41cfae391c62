"""Samplers hold the weights of one moment."""

from __future__ import annotations

from typing import Final

import numpy as np

from tinsmith_conformance.data import learned
from tinsmith_conformance.oracle import Floats
from tinsmith_conformance.registry import Group
from tinsmith_conformance.tester import Model, Sampler, Tester
from tinsmith_conformance.verdicts import expect, skip

GROUP: Final = Group("snapshots", "Samplers hold the weights of one moment, and those of training.")

_AGREE: Final = 2e-3  # between trainer and sampler, in nats
_PROPAGATION_TRIES: Final = 20


def _trained(t: Tester) -> Model:
    model = t.model()
    for _ in range(3):
        model.step([learned()], learning_rate=0.05)
    return model


def _near(a: Floats, b: Floats, what: str) -> None:
    expect(np.abs(a - b).max() < _AGREE, f"{what} differ by {np.abs(a - b).max():.2g} nats")


@GROUP.check
def trained_is_sampled(t: Tester) -> None:
    """A sampler scores as its model does.

    Rollouts are off policy from the start: what is sampled is not what was trained.
    """
    model = _trained(t)
    _near(model.sampler().scores(), model.logprobs(), "sampler and trainer")


@GROUP.check
def named_is_sampled(t: Tester) -> None:
    """A saved snapshot scores as its model did.

    A published adapter is not the one that was trained.
    """
    model = _trained(t)
    _near(t.sampler(model.save_for_sampling()).scores(), model.logprobs(), "sampler and trainer")


@GROUP.check
def base_is_sampled(t: Tester) -> None:
    """The base model scores as a new adapter does.

    Reference models of KL penalties are others.
    """
    _near(t.sampler().scores(), t.model().logprobs(), "sampler and trainer")


@GROUP.check
def base_stays(t: Tester) -> None:
    """Training leaves the base model's sampler as it is, bit for bit.

    Reference models drift.
    """
    base = t.sampler()
    before = base.scores()
    _trained(t).sampler().draw()
    expect(np.array_equal(base.scores(), before), "it changed")


@GROUP.check
def ephemeral_stays(t: Tester) -> None:
    """A sampler stays as it was when its model is trained on.

    Samples come from weights of later, with logprobs of nobody.
    """
    model = _trained(t)
    sampler = model.sampler()
    before = sampler.scores()
    model.step([learned()], learning_rate=0.1)
    expect(np.array_equal(sampler.scores(), before), "it changed")


@GROUP.check
def first_read_late(t: Tester) -> None:
    """A sampler that is first asked after more training has the weights of its own moment.

    Weights are taken when they are first needed, and not when they were asked for.
    """
    model = _trained(t)
    wanted, sampler = model.logprobs(), model.sampler()
    model.step([learned()], learning_rate=0.1)
    _near(sampler.scores(), wanted, "sampler and trainer")


@GROUP.check
def named_stays(t: Tester) -> None:
    """A saved snapshot stays as it was when its model is trained on.

    All checkpoints of a run are the last one, or the first.
    """
    model = _trained(t)
    wanted, path = model.logprobs(), model.save_for_sampling()
    model.step([learned()], learning_rate=0.1)
    _near(t.sampler(path).scores(), wanted, "sampler and trainer")


@GROUP.check
def sampling_does_not_train(t: Tester) -> None:
    """Sampling from an old snapshot leaves the model in training, bit for bit.

    An evaluation throws training back to an old checkpoint.
    """
    model = _trained(t)
    old = model.sampler()
    model.step([learned()], learning_rate=0.1)
    before = model.logprobs()
    old.draw(n=2)
    expect(np.array_equal(model.logprobs(), before), "the weights of training changed")


@GROUP.check
def sampling_between_passes(t: Tester) -> None:
    """Sampling between a pass and its step does not change the step.

    Asynchronous training depends on when samples come.
    """
    model, clean = t.model(), t.model()
    for each in (model, clean):
        each.forward_backward([learned()]).result()
    model.sampler().draw()
    for each in (model, clean):
        each.optim_step(learning_rate=0.01).result()
    expect(np.array_equal(model.logprobs(), clean.logprobs()), "the weights differ")


@GROUP.check
def several_at_once(t: Tester) -> None:
    """Samplers of several steps are there at once, each with its own weights.

    Off-policy training samples from the wrong step.
    """
    model, samplers, wanted = t.model(), [], []
    for _ in range(4):
        model.step([learned()], learning_rate=0.05)
        samplers.append(model.sampler())
        wanted.append(model.logprobs())
    for sampler, logprobs in zip(samplers[::-1], wanted[::-1], strict=True):
        _near(sampler.scores(), logprobs, "sampler and trainer")


@GROUP.check
def several_names(t: Tester) -> None:
    """Several saved snapshots of a run are served, each with its own weights.

    All checkpoints of a run are served as the first one loaded.
    """
    model, saved = t.model(), []
    for number in range(3):
        model.step([learned()], learning_rate=0.05)
        saved.append((model.save_for_sampling(f"at-{number}"), model.logprobs()))
    for path, logprobs in saved:
        _near(t.sampler(path).scores(), logprobs, "sampler and trainer")


@GROUP.check
def two_of_one_state(t: Tester) -> None:
    """Two snapshots of one state are the same, bit for bit.

    Evaluations of one checkpoint differ.
    """
    model = _trained(t)
    expect(np.array_equal(model.sampler().scores(), model.sampler().scores()), "they differ")


@GROUP.check
def two_models(t: Tester) -> None:
    """Samplers of two models are not mixed up.

    One user's samples come from another one's adapter.
    """
    first, second = _trained(t), t.model(seed=2)
    second.step([learned((5, 6, 7, 8, 9))], learning_rate=0.05)
    samplers = first.sampler(), second.sampler()
    for model, sampler in zip((first, second), samplers, strict=True):
        _near(sampler.scores(), model.logprobs(), "sampler and trainer")


@GROUP.check
def ephemeral_is_not_listed(t: Tester) -> None:
    """An ephemeral sampler is no checkpoint of its run.

    Lists of checkpoints fill with one per step.
    """
    model = t.model()
    model.sampler()
    found = t.get(f"training_runs/{model.id}/checkpoints")["checkpoints"]
    expect(not found, f"it is listed: {found}")


@GROUP.check
def about_samplers(t: Tester) -> None:
    """A sampler tells its base model and its path.

    The SDK creates no sampling client from a path.
    """
    path = t.model().save_for_sampling()
    sampler = t.sampler(path)
    found = t.get(f"samplers/{sampler.id}")
    expect(found.get("sampler_id") == sampler.id, f"sampler_id is {found.get('sampler_id')}")
    expect(found.get("base_model") == t.target.model, f"base_model is {found.get('base_model')}")
    expect(found.get("model_path") == path, f"model_path is {found.get('model_path')}")


@GROUP.check
def deleted_snapshots(t: Tester) -> None:
    """A snapshot that was deleted cannot be sampled from any more.

    What was taken back stays in use.
    """
    model = t.model()
    path = model.save_for_sampling("gone")
    t.ok_without_body(t.http.delete(f"training_runs/{model.id}/checkpoints/sampler_weights/gone"))
    body = {"session_id": t.session, "sampling_session_seq_id": 60, "model_path": path}
    t.refused(t.http.post("create_sampling_session", json=body))


@GROUP.check
def inflight(t: Tester) -> None:
    """A sampler of kind 'inflight' follows later saves of this kind, or is refused by name.

    Samples come from weights that the user believes to be newer.
    """
    model = t.model()
    body = {"model_id": model.id, "seq_id": model.number(), "kind": "inflight"}
    answer = t.http.post("save_weights_for_sampler", json={**body, "sampling_session_seq_id": t.sampling_number()})
    saved = t.future(answer).finished().json() if answer.is_success else {}
    if "sampling_session_id" not in saved:
        words = answer.text + str(saved)
        expect("inflight" in words, f"the refusal does not name it: {words[:300]}")
        return
    first = Sampler(t, saved["sampling_session_id"])
    before = first.scores()
    model.step([learned()], learning_rate=0.05)
    number = t.sampling_number()
    later = model.submit("save_weights_for_sampler", sampling_session_seq_id=number, kind="inflight").result()
    second = Sampler(t, later["sampling_session_id"])
    _near(second.scores(), model.logprobs(), "a new sampler and the trainer")
    late = first.scores()
    for _ in range(_PROPAGATION_TRIES):  # an update may take its time
        if np.abs(late - model.logprobs()).max() < _AGREE:
            break
        late = first.scores()
    _near(late, model.logprobs(), "the earlier sampler and the trainer")
    expect(np.abs(late - before).max() > _AGREE, "training changed nothing, so nothing can be seen to follow it")


@GROUP.check
def joined_sessions(t: Tester) -> None:
    """Clones of a sampling session get different numbers.

    Two copies of a client read each other's samples.
    """
    sampler = t.sampler()
    if t.http.post("join_sampling_session", json={"sampling_session_id": sampler.id}).status_code in (404, 405, 501):
        skip("join_sampling_session is not offered; the SDK draws these numbers itself")
    counters = {t.ok("join_sampling_session", {"sampling_session_id": sampler.id})["client_counter"] for _ in range(3)}
    expect(len(counters) == 3 and min(counters) >= 1, f"they are {counters}")
