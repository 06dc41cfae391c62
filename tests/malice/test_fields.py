"""Fuzzes every body that changes numbers with fields of random names and values: none is accepted without effect."""

import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import orjson
import pytest
import requests
import wire_bodies
from attacker import ANSWER_S, Answer, Attacker, Request
from campaign_server import ATTACKER, BASE_MODEL
from fuzzing import FORMS, Form, examples_of, fuzzed_server
from google.protobuf.descriptor import Descriptor
from hypothesis import strategies as st
from pydantic import BaseModel
from test_protobuf import varint

from tinsmith.protocol import translate, wire
from tinsmith.protocol.proto import tinker_public_pb2 as pb
from tinsmith.protocol.unknown_fields import validated
from tinsmith.server.metrics import MOST_NAMES

Place = tuple[str | int, ...]
Fields = dict[str, Any]

REFUSED = "is not known, "
DISCARDED = "this step is discarded"  # because an earlier pass was refused, which is named
EXAMPLES_OF_A_SESSION = 200
ADDRESSES = {"model_id", "seq_id", "session_id", "model_seq_id", "sampling_session_id", "sampling_session_seq_id"}
"""Another value of these makes it another request."""
STORED = {"user_metadata"}

# Names and values -----------------------------------------------------------------------------------------------------

OF_OTHERS = (
    *("alpha", "lora_alpha", "dropout", "target_modules", "use_rslora", "bias", "precision", "dtype", "quantization"),
    *("amsgrad", "fused", "momentum", "lr", "betas", "clip_grad", "warmup_steps", "ema", "loss_scale", "normalize"),
    *("min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "logit_bias", "best_of", "n", "stream"),
    *("stop_token_ids", "ignore_eos", "max_new_tokens", "bad_words", "guided_json", "logprobs", "echo", "suffix"),
    *("reference_model", "merge", "shards", "format", "encryption", "async", "priority", "extra_body"),
)
"""As other servers and trainers have them."""
EXACT = [each for each in vars(wire).values() if isinstance(each, type) and issubclass(each, wire.ExactBody)]
KNOWN = st.sampled_from(sorted({name for each in EXACT for name in each.model_fields}))
CHANGES = st.sampled_from(
    [str.upper, str.title, lambda name: f"{name}s", lambda name: f" {name}", lambda name: name[:-1]]
)
TEXTS = st.text(st.characters(codec="utf-8"), max_size=12)
NAMES = st.one_of(
    st.sampled_from(OF_OTHERS), KNOWN, st.builds(lambda change, name: change(name), CHANGES, KNOWN), TEXTS
)
NUMBERS = st.one_of(
    st.integers(-3, 3), st.integers(-(2**63), 2**64 - 1), st.floats(allow_nan=False, allow_infinity=False)
)
VALUES = st.recursive(
    st.one_of(st.none(), st.booleans(), NUMBERS, TEXTS),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(TEXTS, inner, max_size=2)),
    max_leaves=4,
)

# Bodies ---------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Target:
    path: str
    model: type[BaseModel]
    places: tuple[Place, ...]  # of the objects in it
    fields: Fields
    addressed_by: tuple[str, ...] = ("model_id", "seq_id")


TENSOR = {"data": [1, 2, 3], "dtype": "int64", "shape": [3, 1]}
PROMPT = {"chunks": [{"type": "encoded_text", "tokens": [1, 2, 3, 4]}]}
OF_MODEL = ("session_id", "model_seq_id")
SAMPLE = {"prompt": PROMPT, "sampling_params": {"max_tokens": 1}}
OF_SAMPLE = ((), ("sampling_params",), ("prompt",), ("prompt", "chunks", 0), ("target_prompt_logprobs",))
TARGETS = (
    Target(
        "create_model",
        wire.CreateModelRequest,
        ((), ("lora_config",), ("optimizer_config",)),
        {"base_model": BASE_MODEL, "lora_config": {"rank": 4}, "optimizer_config": {"type": "adamw"}},
        OF_MODEL,
    ),
    Target("optim_step", wire.OptimStepRequest, ((), ("adam_params",)), {"adam_params": {"learning_rate": 0.01}}),
    Target("save_weights", wire.SaveWeightsRequest, ((),), {"path": "again", "overwrite": True}),
    Target("save_weights_for_sampler", wire.SaveWeightsForSamplerRequest, ((),), {"path": "once"}),
    Target(
        "save_weights_for_sampler",
        wire.SaveWeightsForSamplerRequest,
        ((),),
        {},
        ("model_id", "seq_id", "sampling_session_seq_id"),
    ),
    Target("save_weights_external", wire.SaveWeightsExternalRequest, ((),), {"path": "once"}),
    Target("load_weights", wire.LoadWeightsRequest, ((),), {"path": "", "optimizer": True}),
    Target(
        "load_weights",
        wire.LoadWeightsRequest,
        ((), ("optimizer_config",)),
        {"path": "", "optimizer": False, "optimizer_config": {"type": "adamw"}},
        OF_MODEL,
    ),
    Target(
        "create_sampling_session",
        wire.CreateSamplingSessionRequest,
        ((),),
        {"base_model": BASE_MODEL},
        ("session_id", "sampling_session_seq_id"),
    ),
    Target("asample", wire.SampleRequest, OF_SAMPLE[:-1], SAMPLE, ("sampling_session_id", "seq_id")),
    Target(
        "asample",
        wire.SampleRequest,
        OF_SAMPLE,
        {**SAMPLE, "target_prompt_logprobs": TENSOR},
        ("sampling_session_id", "seq_id"),
    ),
)
Json = tuple[Target, Place, str, Any]
PLACES = [(target, place) for target in TARGETS for place in target.places]


def at(body: Any, place: Place) -> Any:
    for step in place:
        body = body[step] if isinstance(body, dict | list) else getattr(body, str(step))
    return body


def known_names(target: Target, place: Place) -> list[str]:
    inner: Any = target.model
    for step in place:
        inner = inner if isinstance(step, int) else _model_in(inner.model_fields[step].annotation)
    return sorted(inner.model_fields)


def _model_in(annotation: Any) -> type[BaseModel] | None:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next(filter(None, map(_model_in, get_args(annotation))), None)


JSON = st.sampled_from(PLACES).flatmap(
    lambda found: st.tuples(
        st.just(found[0]), st.just(found[1]), st.one_of(NAMES, st.sampled_from(known_names(*found))), VALUES
    )
)


def asked(target: Target, body: Fields) -> str:
    """Return what the server is asked to do, without whose request it is."""
    request: Any = validated(target.model, orjson.loads(orjson.dumps(body)))
    match target.path:
        case "create_model":
            found: object = translate.create_model(request)
        case "optim_step":
            found = translate.optim_step(request)
        case "save_weights":
            found = translate.save_weights(request)
        case "save_weights_for_sampler":
            found = translate.save_weights_for_sampler(request, "s")
        case "save_weights_external":
            found = translate.save_weights_external(request)
        case "load_weights" if "seq_id" in target.addressed_by:
            found = translate.load_weights(request)
        case "asample":
            found = translate.sample(request, sampling_session="s", snapshot_id=None, max_context_tokens=512)
        case _:
            found = request.model_dump(exclude={"optimizer_config", "type", *STORED})
    return repr(found)


# Protobuf -------------------------------------------------------------------------------------------------------------

Way = tuple[int, ...]
Proto = tuple[tuple[Descriptor, Way], int, int, bytes]


def messages(message: Descriptor, *above: int) -> list[tuple[Descriptor, Way]]:
    """Return every message in a request, and the way to it: field numbers, the outermost first."""
    inner = [(field.message_type, field.number) for field in message.fields if field.message_type is not None]
    return [(message, above), *(each for kind, number in inner for each in messages(kind, *above, number))]


MESSAGES = messages(pb.ForwardBackwardRequest.DESCRIPTOR)
PROTO = st.tuples(
    st.sampled_from(MESSAGES),
    st.one_of(st.integers(1, 20), st.integers(1, 2**29 - 1)),
    st.sampled_from([0, 1, 2, 5]),
    st.one_of(st.just(bytes(8)), st.binary(min_size=8, max_size=8)),
)
MAP_NAMES = st.tuples(st.sampled_from(["loss_fn_inputs", "loss_fn_config", "loss_fn_config_v2"]), NAMES, st.floats())


def length_delimited(number: int, content: bytes) -> bytes:
    return varint(number << 3 | 2) + varint(len(content)) + content


# The client -----------------------------------------------------------------------------------------------------------


class Fuzzer:
    """Sends one changed request at a time, with new models and numbers."""

    def __init__(self, attacker: Attacker) -> None:
        self._attacker = attacker
        self.outcomes = Counter[str]()
        self._renew()
        saved = attacker.ask("save_weights", model_id=self._model_id, seq_id=1, path="loaded")["request_id"]
        self._path = orjson.loads(attacker.result(saved).content)["path"]
        self._seq_id = 2

    def _renew(self) -> None:
        self._attacker.end_session()
        self._model_id = self._attacker.new_model()
        self._session_id = self._model_id.partition(":")[0]
        self._seq_id, self._number = 1, 1
        sampling = {"session_id": self._session_id, "sampling_session_seq_id": 0, "base_model": BASE_MODEL}
        self._sampler_id = self._attacker.ask("create_sampling_session", **sampling)["sampling_session_id"]

    def _begin(self) -> None:
        self._number += 1
        if self._number % EXAMPLES_OF_A_SESSION == 0:
            self._renew()

    def _body(self, target: Target) -> Fields:
        addresses = {
            "model_id": self._model_id,
            "seq_id": self._number if target.path == "asample" else self._seq_id,
            "session_id": self._session_id,
            "model_seq_id": self._number,
            "sampling_session_id": self._sampler_id,
            "sampling_session_seq_id": self._number,
        }
        body: Fields = orjson.loads(orjson.dumps(target.fields))
        if target.path == "load_weights":
            body["path"] = self._path
        return {**{name: addresses[name] for name in target.addressed_by}, **body}

    def _answer(self, request: Request, *, is_numbered: bool) -> Answer:
        """Return the answer, or the result of what was accepted."""
        answer = self._attacker.send(request)
        assert 200 <= answer.status < 500, answer
        if answer.request_id is None:
            return answer
        self._seq_id += is_numbered
        return self._attacker.result(answer.request_id)

    def send_json(self, example: Json) -> None:
        self._begin()
        target, place, name, value = example
        plain = self._body(target)
        body = orjson.loads(orjson.dumps(plain))
        at(body, place)[name] = value
        is_numbered = "model_id" in target.addressed_by
        answer = self._answer(Request(target.path, orjson.dumps(body)), is_numbered=is_numbered)
        if name not in known_names(target, place):
            self._check_unknown(answer, holds_something=bool(value), what=(target.path, place, name, value))
        elif answer.status == 200 and answer.error_category is None:
            self.outcomes["known, with effect"] += 1
            assert name in ADDRESSES | STORED or _has_effect(target, place, name, plain, body), (example, answer)
        else:
            self.outcomes["known, refused"] += 1
        if name in ADDRESSES:
            self._renew()

    def _check_unknown(self, answer: Answer, *, holds_something: bool, what: object) -> None:
        refused = REFUSED in answer.text and DISCARDED not in answer.text
        self.outcomes["unknown, refused" if refused else "unknown, holds nothing"] += 1
        assert refused == holds_something, (what, answer)

    def send_proto(self, example: Proto) -> None:
        self._begin()
        (message, way), number, form, raw = example
        value = {0: varint(int.from_bytes(raw, "little")), 1: raw, 2: varint(len(raw.strip(b"\0"))), 5: raw[:4]}[form]
        value += raw.strip(b"\0") if form == 2 else b""
        content = varint(number << 3 | form) + value
        for step in reversed(way):
            content = length_delimited(step, content)
        answer = self._pass(content)
        if number not in message.fields_by_number:
            self._check_unknown(answer, holds_something=any(value), what=(message.name, number, form, raw))

    def send_name(self, example: tuple[str, str, float]) -> None:
        """In a map, the name of every entry counts, whatever it holds."""
        self._begin()
        place, name, number = example
        message = pb.ForwardBackwardRequest()
        match place:
            case "loss_fn_inputs":
                tensor = message.data.add().loss_fn_inputs[name]
                tensor.dense, tensor.dtype = wire_bodies.float32([0.5]), pb.DTYPE_FLOAT32
            case "loss_fn_config":
                message.loss_fn_config[name] = number
            case _:
                message.loss_fn_config_v2[name].number = number
        answer = self._pass(message.SerializeToString())
        assert answer.status != 200 or answer.error_category == "user", (example, answer)
        self.outcomes["name in a map, refused"] += 1

    def _pass(self, content: bytes) -> Answer:
        body = wire_bodies.forward_backward(self._model_id, self._seq_id, data=1, tokens=4) + content
        return self._answer(Request("forward_backward", body, wire_bodies.PROTOBUF), is_numbered=True)


def _has_effect(target: Target, place: Place, name: str, plain: Fields, body: Fields) -> bool:
    """Return whether the field asks for something else, or for what happens without it."""
    if asked(target, body) != asked(target, plain):
        return True
    changed, left = (at(validated(target.model, orjson.loads(orjson.dumps(each))), place) for each in (body, plain))
    default = type(left).model_fields[name].get_default(call_default_factory=True)
    return not at(body, place)[name] or repr(getattr(changed, name)) in {repr(getattr(left, name)), repr(default)}


@pytest.mark.parametrize("form", FORMS)
def test_no_field_is_accepted_without_effect(form: Form, tmp_path: Path) -> None:
    with fuzzed_server(form, tmp_path) as (url, _), Attacker(url, ATTACKER, BASE_MODEL) as attacker:
        fuzzer, began, number = Fuzzer(attacker), time.monotonic(), 0
        while number == 0 or time.monotonic() - began < form.seconds:
            examples_of(JSON, fuzzer.send_json, form.of(100), number)
            examples_of(PROTO, fuzzer.send_proto, form.of(40), number)
            examples_of(MAP_NAMES, fuzzer.send_name, form.of(10), number)
            number += 1
        shown = requests.get(f"{url}/metrics", timeout=ANSWER_S).text
        assert shown.count("tinsmith_unknown_fields_total{") <= MOST_NAMES + len(EXACT) + len(MESSAGES)
        print(f"\n{fuzzer.outcomes.total()} requests, {dict(fuzzer.outcomes)}, {number} seeds")
