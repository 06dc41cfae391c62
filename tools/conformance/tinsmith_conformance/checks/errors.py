"""Mistakes of users: refused at once, with a reason, and never with a status that the SDK repeats."""

from __future__ import annotations

from typing import Any, Final

import httpx
import numpy as np
from tinker.proto import tinker_public_pb2 as pb

from tinsmith_conformance.data import TOKENS, Sequence, learned
from tinsmith_conformance.registry import Group
from tinsmith_conformance.tester import ADAM, PROTOBUF, Tester
from tinsmith_conformance.verdicts import expect, skip

GROUP: Final = Group("errors", "Mistakes are refused at once, with a reason, and not with what the SDK repeats.")


@GROUP.check
def no_key(t: Tester) -> None:
    """A request without a key gets a 401.

    Anybody in the network uses the server, or the SDK cannot say what is wrong.
    """
    status = httpx.post(f"{t.target.url}/api/v1/create_session", json={}, timeout=30).status_code
    expect(status in (401, 403), f"status {status}")


_MODELS: Final[list[tuple[str, dict[str, Any], str]]] = [
    ("a base model that is not there", {"base_model": "no-such/model"}, "no-such/model"),
    ("rank 0 or full fine-tuning that is not offered", {"rank": -1}, ""),
    ("an enormous rank", {"rank": 10**6}, ""),
    ("nothing to train", {"train_attn": False, "train_mlp": False, "train_unembed": False}, ""),
    ("a session that is not there", {"session_id": "no-such-session"}, ""),
    ("a field that does not exist", {"no_such_field": 1}, "no_such_field"),
]


@GROUP.each(_MODELS)
def models(t: Tester, case: tuple[str, dict[str, Any], str]) -> None:
    """create_model with {case} is refused.

    Another model is trained than was asked for.
    """
    words = t.refused(t.new_model(**case[1]))
    expect(case[2] in words, f"the refusal does not name '{case[2]}': {words}")


_TRAINING: Final[list[tuple[str, str, dict[str, Any]]]] = [
    ("optim_step of a model that is not there", "optim_step", {"model_id": "x:train:0", "adam_params": dict(ADAM)}),
    ("optim_step without parameters", "optim_step", {}),
    ("optim_step with a learning rate of text", "optim_step", {"adam_params": {**ADAM, "learning_rate": "fast"}}),
    ("optim_step with an unknown parameter", "optim_step", {"adam_params": {**ADAM, "nesterov": True}}),
    ("save_weights without a name", "save_weights", {}),
    ("save_weights that lives for a second", "save_weights", {"path": "a", "ttl_seconds": 1}),
    ("save_weights that lives for a century", "save_weights", {"path": "a", "ttl_seconds": 10**10}),
    ("load_weights without a path", "load_weights", {"optimizer": True}),
]


@GROUP.each(_TRAINING)
def training(t: Tester, case: tuple[str, str, dict[str, Any]]) -> None:
    """{case} is refused.

    A mistake in a script shows hours later, or the SDK repeats it for minutes.
    """
    t.refusal(case[1], {"model_id": t.model().id, "seq_id": 1, **case[2]})


@GROUP.check
def number_is_missing(t: Tester) -> None:
    """A step without a number is refused.

    It is taken for another one.
    """
    t.refused(t.http.post("optim_step", json={"model_id": t.model().id, "adam_params": dict(ADAM)}), 400, 422)


_N: Final = len(TOKENS) - 1
_DATA: Final[list[tuple[str, Sequence]]] = [
    ("no tokens", Sequence([], {"target_tokens": np.zeros(0, np.int64), "weights": np.zeros(0)})),
    ("targets of another length", Sequence(TOKENS[:-1], {"target_tokens": np.ones(3), "weights": np.ones(_N)})),
    ("a negative token", learned([1, -5, 2, 3])),
    ("a target that is no token", Sequence([1, 2], {"target_tokens": np.array([3, 2**40]), "weights": np.ones(2)})),
    ("an input that is not known", Sequence([1, 2], {**learned([1, 2, 3]).inputs, "no_such_input": np.ones(2)})),
    ("more tokens than the context holds", learned([1] * 200_000)),
]


@GROUP.each(_DATA)
def data(t: Tester, case: tuple[str, Sequence]) -> None:
    """A pass with {case} is refused.

    Losses are of other tokens, NaN, or the server stops.
    """
    model = t.model()
    t.refused(model.send_pass(model.pass_body([case[1]], seq_id=model.number())))


@GROUP.check
def goes_on(t: Tester) -> None:
    """After a refused request, the next ones run.

    Training waits for ever for the number of the refused one.
    """
    model = t.model()
    t.refused(model.send_pass(model.pass_body([learned([1, -5, 2])], seq_id=model.number())))
    model.forward([learned()])


_BODIES: Final[list[tuple[str, bytes]]] = [
    ("rubbish", b"\xff\xff\xff\xffrubbish"),
    ("nothing", b""),
    ("half of a message", b"\x0a\x20half"),
]


@GROUP.each(_BODIES)
def protobuf(t: Tester, case: tuple[str, bytes]) -> None:
    """A pass of {case} instead of protobuf is refused.

    The server answers 500, and the SDK repeats it for five minutes.
    """
    t.refused(t.http.post("forward_backward", content=case[1], headers={"Content-Type": PROTOBUF}))


@GROUP.each([("text", b"hello"), ("a list", b"[]"), ("half an object", b'{"tags": ['), ("nothing", b"")])
def json_bodies(t: Tester, case: tuple[str, bytes]) -> None:
    """{case} instead of an object of JSON is refused.

    The server answers 500, and the SDK repeats it for five minutes.
    """
    headers = {"Content-Type": "application/json"}
    t.refused(t.http.post("create_model", content=case[1], headers=headers), 400, 422)


@GROUP.check
def unknown_routes(t: Tester) -> None:
    """A route that does not exist gets a 404.

    Newer SDKs wait or repeat, where they could say what is missing.
    """
    status = t.http.post("no_such_route", json={}).status_code
    expect(status == 404, f"status {status}")


@GROUP.check
def wrong_methods(t: Tester) -> None:
    """GET of a route for POST gets a 404 or 405.

    The server answers 500.
    """
    status = t.http.get("create_model").status_code
    expect(status in (404, 405), f"status {status}")


_PARAMS: Final[list[tuple[str, dict[str, Any]]]] = [
    ("no samples", {"n": 0}),
    ("a negative temperature", {"temperature": -1.0}),
    ("top_p of 2", {"top_p": 2.0}),
    ("max_tokens of 0", {"max_tokens": 0}),
    ("negative max_tokens", {"max_tokens": -3}),
    ("an empty prompt", {"prompt": []}),
    ("a prompt of unknown tokens", {"prompt": [1, 2**31 - 1]}),
    ("a negative token", {"prompt": [1, -2]}),
    ("text as max_tokens", {"max_tokens": "many"}),
    ("an unknown parameter", {"no_such_parameter": 1}),
    ("a stop of nothing known", {"stop": {"a": 1}}),
]


@GROUP.each(_PARAMS)
def sampling(t: Tester, case: tuple[str, dict[str, Any]]) -> None:
    """A sample with {case} is refused.

    Rollouts hold something else than was asked for.
    """
    t.refused(t.http.post("asample", json=t.sampler().body(**case[1])))


@GROUP.check
def unknown_samplers(t: Tester) -> None:
    """A sample of a sampling session that is not there is refused, and not with a 5xx.

    The SDK repeats it without end.
    """
    body = {**t.sampler().body(), "sampling_session_id": "no-such-sampler"}
    t.refusal("asample", body)


@GROUP.each(["no-such/model", "tinker://none/sampler_weights/none"])
def unknown_sources(t: Tester, case: str) -> None:
    """A sampling session of {case} is refused.

    Another model is sampled than was asked for.
    """
    source = {"model_path": case} if case.startswith("tinker") else {"base_model": case}
    t.refusal("create_sampling_session", {"session_id": t.session, "sampling_session_seq_id": 70, **source})


@GROUP.check
def ended_sessions(t: Tester) -> None:
    """A model cannot be created in a session that has ended.

    It lives for ever: nobody ends it again.
    """
    session = t.new_session()
    t.ok_without_body(t.http.post(f"sessions/{session}/finish", json={"reason": {"type": "success"}}))
    t.refused(t.new_model(session_id=session))


def _with_chunk(t: Tester, **fields: Any) -> httpx.Response:
    model = t.model()
    request = pb.ForwardBackwardRequest()
    request.ParseFromString(model.pass_body([learned()], seq_id=1, forward_only=True))
    chunk = request.data[0].model_input.add()
    for name, value in fields.items():
        getattr(chunk, name).CopyFrom(value)
    return model.send_pass(request.SerializeToString())


@GROUP.check
def sound(t: Tester) -> None:
    """Sound that a model does not hear is refused by name.

    Tokens and targets are misaligned without a word.
    """
    words = t.refused(_with_chunk(t, dmel=pb.DmelChunk(dmel=b"\x00\x01\x01")))
    expect("dmel" in words.lower() or "audio" in words.lower(), f"the refusal does not say so: {words}")


@GROUP.check
def images(t: Tester) -> None:
    """Images are read by a model that sees, and refused by name by others.

    Images are dropped: tokens and targets are misaligned without a word.
    """
    answer = _with_chunk(t, image=pb.ImageChunk(data=b"\x89PNG\r\n\x1a\n", format="png", expected_tokens=3))
    words = t.refused(answer)
    expect("image" in words.lower(), f"the refusal does not say so: {words}")
    skip("this model reads no images, and says so")
