"""What two users can see of each other, by two API keys."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import httpx
import numpy as np

from tinsmith_conformance.data import OTHER_TOKENS, learned, ragged
from tinsmith_conformance.registry import Group
from tinsmith_conformance.tester import ADAM, Future, Model, Sampler, Tester
from tinsmith_conformance.verdicts import expect

GROUP: Final = Group("isolation", "What users can see and change of each other.")


@dataclass(frozen=True, slots=True)
class _Owned:
    """What somebody else owns."""

    owner: Tester
    model: Model
    state: str
    snapshot: str
    sampler: Sampler
    future: Future

    @property
    def checkpoint(self) -> str:
        return f"training_runs/{self.model.id}/checkpoints/weights/mine"


def _owned(t: Tester) -> tuple[Tester, _Owned]:
    """Return an intruder, and the first user's property."""
    model = t.model()
    passed = model.forward_backward([learned()])
    passed.result()
    state, snapshot = model.save("mine"), model.save_for_sampling("mine")
    return t.other(), _Owned(t, model, state, snapshot, t.sampler(snapshot), passed)


Attack = Callable[[Tester, _Owned], httpx.Response]


def _post(call: str, /, **body: object) -> Attack:
    def attack(t: Tester, owned: _Owned) -> httpx.Response:
        known = {
            "{model}": owned.model.id,
            "{state}": owned.state,
            "{snapshot}": owned.snapshot,
            "{future}": owned.future.id,
            "{session}": owned.owner.session,
            "{sampler}": owned.sampler.id,
            "{own_session}": t.session,
        }
        filled = {name: known.get(str(value), value) for name, value in body.items()}
        return t.http.post(call, json=filled)

    return attack


def _pass(t: Tester, owned: _Owned) -> httpx.Response:
    return Model(t, owned.model.id).send_pass(owned.model.pass_body([learned()], seq_id=50))


def _sample(t: Tester, owned: _Owned) -> httpx.Response:
    return t.http.post("asample", json=Sampler(t, owned.sampler.id).body())


_ATTACKS: Final[list[tuple[str, Attack]]] = [
    ("read another's model", _post("get_info", model_id="{model}")),
    ("train another's model", _pass),
    ("step another's model", _post("optim_step", model_id="{model}", seq_id=50, adam_params=dict(ADAM))),
    ("save another's model", _post("save_weights", model_id="{model}", seq_id=50, path="stolen", overwrite=False)),
    (
        "snapshot another's model",
        _post("save_weights_for_sampler", model_id="{model}", seq_id=50, path="stolen", kind="snapshot"),
    ),
    ("export another's model", _post("save_weights_external", model_id="{model}", seq_id=50, path="stolen")),
    (
        "load another's checkpoint",
        _post("load_weights", session_id="{own_session}", model_seq_id=50, path="{state}", optimizer=True),
    ),
    (
        "sample another's snapshot",
        _post(
            "create_sampling_session", session_id="{own_session}", sampling_session_seq_id=50, model_path="{snapshot}"
        ),
    ),
    ("use another's sampling session", _sample),
    ("read another's result", _post("retrieve_future", request_id="{future}", allow_metadata_only=True)),
    (
        "put a model into another's session",
        lambda t, owned: t.new_model(session_id=owned.owner.session, model_seq_id=50),
    ),
    ("keep another's session alive", _post("session_heartbeat", session_id="{session}")),
    (
        "end another's session",
        lambda t, owned: t.http.post(f"sessions/{owned.owner.session}/finish", json={"reason": {"type": "success"}}),
    ),
    ("read another's session", lambda t, owned: t.http.get(f"sessions/{owned.owner.session}")),
    ("read another's run", lambda t, owned: t.http.get(f"training_runs/{owned.model.id}")),
    ("list another's checkpoints", lambda t, owned: t.http.get(f"training_runs/{owned.model.id}/checkpoints")),
    ("read another's sampler", lambda t, owned: t.http.get(f"samplers/{owned.sampler.id}")),
    ("read about another's weights", _post("weights_info", tinker_path="{state}")),
    ("delete another's checkpoint", lambda t, owned: t.http.delete(owned.checkpoint)),
    ("publish another's checkpoint", lambda t, owned: t.http.post(f"{owned.checkpoint}/publish")),
    (
        "let another's checkpoint expire",
        lambda t, owned: t.http.put(f"{owned.checkpoint}/ttl", json={"ttl_seconds": 3600}),
    ),
]


@GROUP.each(_ATTACKS)
def attacks(t: Tester, case: tuple[str, Attack]) -> None:
    """Nobody can {case}.

    Users of one server have no secrets, or destroy each other's work.
    """
    intruder, owned = _owned(t)
    intruder.refused(case[1](intruder, owned))


@GROUP.check
def foreign_and_absent_look_alike(t: Tester) -> None:
    """Another's model is refused as one that does not exist.

    Anybody can find out what others have.
    """
    intruder, owned = _owned(t)
    absent = "0" * len(owned.model.id.split(":")[0]) + ":train:0"
    answers = [intruder.http.post("get_info", json={"model_id": name}) for name in (owned.model.id, absent)]
    first, second = (each.text.replace(name, "X") for each, name in zip(answers, (owned.model.id, absent), strict=True))
    expect(answers[0].status_code == answers[1].status_code, f"status {[each.status_code for each in answers]}")
    expect(first == second, f"{first} and {second}")


@GROUP.each(["training_runs", "checkpoints", "sessions"])
def lists(t: Tester, case: str) -> None:
    """The list of {case} holds nothing of others.

    Anybody can see what others do.
    """
    intruder, owned = _owned(t)
    listed = intruder.http.get(case, params={"limit": 100}).text
    expect(owned.owner.session not in listed, "it does")


@GROUP.check
def published(t: Tester) -> None:
    """Anybody can load a published checkpoint, until it is private again.

    Sharing does not work, or cannot be ended.
    """
    intruder, owned = _owned(t)
    t.ok_without_body(t.http.post(f"{owned.checkpoint}/publish"))
    intruder.model_from(owned.state, optimizer=True)
    t.ok_without_body(t.http.delete(f"{owned.checkpoint}/publish"))
    body = {"session_id": intruder.session, "model_seq_id": 51, "path": owned.state, "optimizer": True}
    intruder.refused(intruder.http.post("load_weights", json=body))


@GROUP.check
def published_is_not_given_away(t: Tester) -> None:
    """A published checkpoint can be deleted by its owner alone.

    Sharing a checkpoint means losing it.
    """
    intruder, owned = _owned(t)
    t.ok_without_body(t.http.post(f"{owned.checkpoint}/publish"))
    intruder.refused(intruder.http.delete(owned.checkpoint))


@GROUP.check
def one_number_of_two_users(t: Tester) -> None:
    """Equal idempotency keys of two users make two sessions.

    Two users share a session by chance, or by intent.
    """
    other = t.other()
    key = {"X-Idempotency-Key": "the same"}
    body = {"tags": [], "sdk_version": "0.38.0"}
    first, second = (each.http.post("create_session", json=body, headers=key).json() for each in (t, other))
    expect(first["session_id"] != second["session_id"], "both have one session")


@GROUP.check
def neighbours_training(t: Tester) -> None:
    """A model's training does not depend on others training beside it, bit for bit.

    Results cannot be repeated on a busy server.
    """
    alone = t.model()
    for _ in range(3):
        alone.step([learned()])
    wanted = alone.logprobs()
    model, other = t.model(), t.other()
    neighbour = other.model(seed=9)
    sent = []
    for _ in range(3):
        sent += [neighbour.forward_backward(ragged(3)), model.forward_backward([learned()])]
        sent += [neighbour.optim_step(learning_rate=0.1), model.optim_step(learning_rate=0.01)]
    for each in sent:
        each.result()
    expect(np.array_equal(model.logprobs(), wanted), "the weights differ from those of a model that trained alone")


@GROUP.check
def neighbours_sampling(t: Tester) -> None:
    """Samples do not depend on others sampling beside them.

    Results cannot be repeated on a busy server.
    """
    sampler = t.sampler()
    wanted = sampler.draw(max_tokens=8, seed=5)
    others = t.model(seed=3).sampler()
    beside = [others.send(others.body(max_tokens=8)) for _ in range(4)]
    drawn = sampler.send(sampler.body(max_tokens=8, seed=5))
    for each in beside:
        each.result()
    tokens = [np.frombuffer(each.tokens, "<i4").tolist() for each in drawn.result().sequences]
    expect(tokens == wanted, f"{tokens}, and alone {wanted}")


@GROUP.check
def inherited_gradients(t: Tester) -> None:
    """A new model has no gradient of one that was ended before.

    A user's first step applies somebody else's batch.
    """
    with Tester(t.target) as earlier:
        earlier.model().forward_backward([learned(OTHER_TOKENS)]).result()
    model = t.model()
    before = model.logprobs()
    model.linear_step().result()
    expect(np.array_equal(model.logprobs(), before), "a step without a pass moved the weights")


@GROUP.check
def bad_seeds(t: Tester) -> None:
    """A sample that is refused does not fail samples that wait beside it.

    One user's typing error costs everybody a rollout.
    """
    sampler = t.sampler()
    good = [sampler.send(sampler.body()) for _ in range(2)]
    t.http.post("asample", json=sampler.body(seed=2**80))
    good.append(sampler.send(sampler.body()))
    for each in good:
        each.result()
