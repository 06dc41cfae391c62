"""What the fields of a JSON body may hold, and that refusing it costs little."""

import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest
from pydantic import BaseModel, ValidationError

from tinsmith.errors import UserError
from tinsmith.protocol import bounds, tensors, wire
from tinsmith.protocol.proto_scan import MAX_ELEMENTS, address_of
from tinsmith.protocol.training_request import MAX_DATA, MAX_TENSORS
from tinsmith.server.limits.bodies import UNPACKED_FREELY
from tinsmith.server.limits.bounded_http import (
    BODY_GRACE_S,
    HEAD_S,
    LINGER_BYTES,
    MAX_HEADER_BYTES,
    MAX_HEADERS,
    MAX_PIPELINED,
    MIN_BYTES_PER_S,
    UNREAD_S,
)
from tinsmith.server.limits.gate import MAX_PATH_CHARS

MEGABYTE = 1 << 20
SAMPLE = {"sampling_session_id": "s", "seq_id": 0}


def peak_bytes(work: Callable[[], object]) -> int:
    tracemalloc.start()
    try:
        work()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def problems(model: type[BaseModel], body: dict[str, Any]) -> list[Any]:
    with pytest.raises(ValidationError) as refused:
        model.model_validate(body)
    return refused.value.errors()


def prompt(tokens: object) -> dict[str, Any]:
    return {"chunks": [{"type": "encoded_text", "tokens": tokens}]}


MILLION: dict[str, tuple[type[BaseModel], dict[str, Any]]] = {
    "tokens of the wrong type": (wire.SampleRequest, {**SAMPLE, "prompt": prompt(["x"] * 1_000_000)}),
    "one token of the wrong type": (wire.SampleRequest, {**SAMPLE, "prompt": prompt([1] * 100_000 + [None])}),
    "chunks of the wrong type": (wire.SampleRequest, {**SAMPLE, "prompt": {"chunks": [0] * 1_000_000}}),
    "empty chunks": (wire.SampleRequest, {**SAMPLE, "prompt": {"chunks": [{}] * 1_000_000}}),
    "stop strings": (wire.SamplingParams, {"stop": ["x"] * 1_000_000}),
    "stops of the wrong type": (wire.SamplingParams, {"stop": [None] * 1_000_000}),
    "targets of the wrong type": (wire.TensorData, {"data": ["x"] * 1_000_000, "dtype": "int64"}),
    "dimensions": (wire.TensorData, {"data": [], "dtype": "int64", "shape": [1] * 1_000_000}),
    "tags": (wire.CreateSessionRequest, {"tags": [0] * 1_000_000}),
    "metadata": (wire.CreateSessionRequest, {"user_metadata": {"x": [0] * 1_000_000}}),
    "recipients": (
        wire.SaveWeightsExternalRequest,
        {"model_id": "m", "seq_id": 1, "age_encryption_recipients": [0] * 1_000_000},
    ),
    "retrieved ids": (
        wire.RetrieveFuturesRequest,
        {"target": {"sampling_session_id": "s"}, "retrieved_request_ids": [0] * 1_000_000},
    ),
}


@pytest.mark.parametrize(("model", "body"), MILLION.values(), ids=MILLION)
def test_a_million_wrong_elements_are_few_errors(model: type[BaseModel], body: dict[str, Any]) -> None:
    found: list[Any] = []
    assert peak_bytes(lambda: found.extend(problems(model, body))) < 12 * MEGABYTE
    assert 1 <= len(found) <= 3


def test_a_million_wrong_values_of_metadata_are_one_error() -> None:
    body = {"model_id": "m", "seq_id": 1, "user_metadata": {str(index): 0 for index in range(100_000)}}
    assert peak_bytes(lambda: problems(wire.SaveWeightsRequest, body)) < 4 * MEGABYTE


def test_a_long_prompt_is_kept_as_an_array() -> None:
    content = {**SAMPLE, "prompt": prompt(list(range(100_000)))}
    request = wire.SampleRequest.model_validate(content)
    tokens = request.prompt.chunks[0].tokens
    assert tokens.dtype == np.int64
    assert tokens.tolist() == list(range(100_000))
    assert request.num_bytes == 800_000


@pytest.mark.parametrize("tokens", [[1.5], [True], ["1"], [None], [[1]], [2**64], {}, "12", None])
def test_tokens_are_integers(tokens: object) -> None:
    [problem] = problems(wire.Chunk, {"tokens": tokens})
    assert problem["loc"] == ("tokens",)


@pytest.mark.parametrize("control", ["\0", "\n", "\x1b", "\x7f", "\x85", "\u2028", "\u202e"])
@pytest.mark.parametrize(
    ("model", "body"),
    [
        (wire.CreateSessionRequest, {"display_name": "a%sb"}),
        (wire.CreateSessionRequest, {"project_id": "a%sb"}),
        (wire.CreateSessionRequest, {"tags": ["a%sb"]}),
        (wire.CreateSessionRequest, {"user_metadata": {"a%sb": 1}}),
        (wire.CreateSessionRequest, {"user_metadata": {"a": [{"a%sb": 1}]}}),
        (wire.SessionRequest, {"session_id": "a%sb"}),
        (wire.ModelRequest, {"model_id": "a%sb"}),
        (wire.RetrieveFutureRequest, {"request_id": "a%sb"}),
        (wire.WeightsInfoRequest, {"tinker_path": "a%sb"}),
        (wire.SaveWeightsRequest, {"model_id": "m", "seq_id": 1, "path": "a%sb"}),
    ],
)
def test_names_hold_no_control_characters(model: type[BaseModel], body: dict[str, Any], control: str) -> None:
    dirty = orjson.loads(orjson.dumps(body).replace(b"%s", orjson.dumps(control)[1:-1]))
    [problem] = problems(model, dirty)
    assert f"this one holds {control!r} at 1; remove it" in problem["msg"]


def test_values_of_metadata_may_have_lines() -> None:
    body = {"user_metadata": {"a": "one\n\ttwo\r\n"}}
    assert wire.CreateSessionRequest.model_validate(body).user_metadata == body["user_metadata"]
    for control in "\0\x1b\u202e":
        assert problems(wire.CreateSessionRequest, {"user_metadata": {"a": f"x{control}"}})


def test_why_a_session_ended_is_cut_rather_than_refused() -> None:
    body = {"reason": {"type": "errored"}, "detail": "a\0b\n" * 10_000}
    detail = wire.FinishSessionRequest.model_validate(body).detail
    assert detail is not None
    assert detail.startswith("a\N{REPLACEMENT CHARACTER}b\n")
    assert len(detail) == 8 * bounds.MAX_NAME_CHARS


def nested(levels: int) -> dict[str, Any]:
    value: Any = 1
    for _ in range(levels):
        value = {"a": value}
    return value


def test_metadata_has_a_size_and_a_depth() -> None:
    wire.CreateSessionRequest.model_validate({"user_metadata": {"a": "x" * (bounds.MAX_METADATA_BYTES - 17)}})
    wire.CreateSessionRequest.model_validate({"user_metadata": nested(bounds.MAX_METADATA_DEPTH - 1)})
    for metadata, reason in (
        ({"a": "x" * (bounds.MAX_METADATA_BYTES - 16)}, "is larger than 32768 bytes"),
        (nested(bounds.MAX_METADATA_DEPTH), "is nested deeper than 32 levels"),
        (nested(300), "is nested deeper than 32 levels"),
    ):
        [problem] = problems(wire.CreateSessionRequest, {"user_metadata": metadata})
        assert reason in problem["msg"]


@pytest.mark.parametrize(
    ("stop", "reason"),
    [
        (["x"] * (bounds.MAX_STOP_STRINGS + 1), "holds 257 strings; allowed: 256"),
        ("x" * (bounds.MAX_STOP_CHARS + 1), "holds 16385 characters; allowed: 16384"),
        (["x" * bounds.MAX_STOP_CHARS, "y"], "holds 16385 characters; allowed: 16384"),
        ([1] * (bounds.MAX_STOP_TOKENS + 1), "holds 8193 tokens; allowed: 8192"),
    ],
)
def test_stops_are_few_and_short(stop: object, reason: str) -> None:
    [problem] = problems(wire.SamplingParams, {"stop": stop})
    assert reason in problem["msg"]


@pytest.mark.parametrize("stop", [None, [], "x", ["x", "y"], [1, 2]])
def test_every_form_of_stop_stays_as_it_was_sent(stop: object) -> None:
    assert wire.SamplingParams.model_validate({"stop": stop}).stop == stop


@pytest.mark.parametrize("piece", [b"[],", b'{"a":1},', b'"a",', b"0,"])
def test_a_body_that_would_take_gigabytes_is_not_decoded(piece: bytes) -> None:
    """64 MiB of empty lists are 1.3 GB of Python objects."""
    body = b'{"x": [' + piece * (16 * MEGABYTE // len(piece)) + b"0]}"

    def decode() -> None:
        with pytest.raises(UserError, match="the body holds more than"):
            bounds.json_content(body)

    assert peak_bytes(decode) < 4 * MEGABYTE  # most of it is the process's own


@pytest.mark.parametrize(
    ("place", "around"),
    [(b"%b", 0), (b'{"a": %b}', 1), (b'{"a": [1, %b]}', 2), (b'[{"b": "]"}, {"a": [], "b": %b}]', 2)],
)
@pytest.mark.parametrize(("opens", "closes"), [(b"[", b"]"), (b'{"a":', b"}"), (b"[1,", b"]"), (b'["[[",', b"]")])
def test_a_body_has_few_levels(place: bytes, around: int, opens: bytes, closes: bytes) -> None:
    """However deep it is, up to what any parser would return."""
    for levels in (bounds.MAX_LEVELS - around, bounds.MAX_LEVELS - around + 1, 500, 1000, 1100, 20_000):
        body = place % (opens * levels + b"1" + closes * levels)
        if levels + around <= bounds.MAX_LEVELS:
            assert bounds.json_content(body) is not None
        else:
            with pytest.raises(UserError, match="the body is nested too deeply, in more than 64 levels"):
                bounds.json_content(body)


def test_a_refused_request_of_training_data_is_not_decoded_as_json_either() -> None:
    body = b'{"model_id": "m", "seq_id": 1, "x": [' + b"[]," * MEGABYTE + b"0]}"
    assert peak_bytes(lambda: address_of(body)) < MEGABYTE
    assert address_of(body[: 1 << 12]) is None
    assert address_of(b'{"model_id": "m", "seq_id": 1}') == ("m", 1)
    assert address_of(b'{"model_id": "m\\u0000", "seq_id": 1}') is None


LIMITS_PAGE = (Path(__file__).parents[2] / "docs/reference/limits.md").read_text()


@pytest.mark.parametrize(
    "text",
    [
        f"{bounds.MAX_NAME_CHARS:,} characters each",
        f"{bounds.MAX_TAGS} tags",
        f"{bounds.MAX_TAGS} names in each filter, {bounds.MAX_OWNERS} owners; {bounds.MAX_FOUND} found in one page",
        f"{bounds.MAX_METADATA_BYTES >> 10} KiB (its characters",
        f"{bounds.MAX_METADATA_DEPTH} levels",
        f"{bounds.MAX_STOP_STRINGS} strings with {bounds.MAX_STOP_CHARS:,} characters",
        f"{bounds.MAX_STOP_TOKENS:,} tokens",
        f"chunks of a prompt | {bounds.MAX_CHUNKS:,} |",
        f"cut after {8 * bounds.MAX_NAME_CHARS:,} characters",
        f"numbers in a JSON body | {bounds.MAX_NUMBERS:,},",
        f"{bounds.MAX_CONTAINERS:,}, in {bounds.MAX_LEVELS} levels; strings: {bounds.MAX_STRINGS:,}",
        f"{MAX_DATA:,} data, each of {bounds.MAX_CHUNKS:,} chunks and {MAX_TENSORS} tensors",
        f"of {bounds.MAX_DIMENSIONS} dimensions; {MAX_ELEMENTS:,} protobuf fields",
        f"{tensors.MAX_DENSE_ELEMENTS:,} elements together",
        f"{BODY_GRACE_S} s, at least {MIN_BYTES_PER_S >> 10} KiB",
        f"| {HEAD_S} s to arrive",
        f"{MAX_HEADER_BYTES >> 10} KiB, {MAX_HEADERS} headers",
        f"earlier answers | {MAX_PIPELINED} |",
        f"| {UNREAD_S} s | the connection is cut",
        f"{LINGER_BYTES >> 20} MiB and {BODY_GRACE_S} s",
        f"{MAX_PATH_CHARS:,} characters, without control",
        f"or {UNPACKED_FREELY >> 20} MiB if that is more",
    ],
)
def test_the_page_of_limits_names_every_bound(text: str) -> None:
    assert text in LIMITS_PAGE
