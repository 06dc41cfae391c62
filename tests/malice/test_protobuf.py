"""Fuzzes forward_backward: bodies that are almost valid, and valid ones whose bytes were damaged."""

import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import wire_bodies
from attacker import Answer, Request
from fuzzing import FORMS, Form, Properties, examples_of, fuzzed_server
from hypothesis import strategies as st

from tinsmith.protocol.proto import tinker_public_pb2 as pb

Mutation = Callable[[bytes], bytes]

INT64 = st.one_of(st.integers(-2, 12), st.sampled_from([2**31 - 1, 2**31, 2**40, 2**63 - 1, -(2**63)]))
TAGS = st.builds(lambda field, wire_type: field << 3 | wire_type, st.integers(0, 16), st.integers(0, 7))
SMALL = st.binary(max_size=24)
FLOATS = st.lists(st.floats(width=32), max_size=8)  # NaN and infinities, too
NAMES = st.sampled_from(["target_tokens", "weights", "logprobs", "advantages", "", "\0", "w" * 300])
LOSSES = st.sampled_from(["cross_entropy", "importance_sampling", "ppo", "cispo", "dro", "", "none"])


def varint(value: int) -> bytes:
    value %= 1 << 64
    found = bytearray()
    while value > 0x7F:
        found.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*found, value])


def usually(value: object, otherwise: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.integers(0, 4).flatmap(lambda number: otherwise if number == 0 else st.just(value))


@st.composite
def sparse(draw: st.DrawFn, rows: int, columns: int, size: int) -> pb.SparseCsr:
    """Return a tensor with the first cell of each row, or something like it."""
    indices = st.lists(INT64, max_size=6)
    return pb.SparseCsr(
        values=draw(usually(bytes(size * rows), SMALL)),
        crow_indices=int64_bytes(draw(usually(range(rows + 1), indices))),
        col_indices=int64_bytes(draw(usually([columns - 1] * rows, indices))),
    )


def int64_bytes(values: Iterable[int]) -> bytes:
    return b"".join((value % 2**64).to_bytes(8, "little") for value in values)


@st.composite
def tensors(draw: st.DrawFn, name: str, num_tokens: int, columns: int | None) -> pb.Tensor:
    """Usually of the right type, size and shape."""
    right = pb.DTYPE_INT64 if name == "target_tokens" else pb.DTYPE_FLOAT32
    tensor = pb.Tensor(dtype=draw(usually(right, st.sampled_from([0, 1, 2, 3, 4, 9]))))
    size = {pb.DTYPE_INT64: 8, pb.DTYPE_BFLOAT16: 2}.get(tensor.dtype, 4)
    if columns is not None and draw(st.booleans()):
        tensor.sparse_csr.CopyFrom(draw(sparse(num_tokens, columns, size)))
    else:
        cells = num_tokens * (columns or 1)
        tensor.dense = draw(usually(bytes(size * cells), st.one_of(SMALL, FLOATS.map(wire_bodies.float32))))
    shape = [num_tokens] if columns is None else [num_tokens, columns]
    tensor.shape.extend(draw(usually(shape, st.lists(INT64, max_size=4))))
    return tensor


@st.composite
def data(draw: st.DrawFn) -> pb.Datum:
    num_tokens, columns = draw(st.integers(0, 6)), draw(st.sampled_from([None, 1, 2]))
    datum = pb.Datum()
    for kind in draw(usually(["text"], st.lists(st.sampled_from(["text", "image", "dmel", "none"]), max_size=3))):
        chunk = datum.model_input.add()
        if kind == "text":
            chunk.encoded_text.tokens = draw(usually(b"\x01\0\0\0" * num_tokens, SMALL))
        elif kind == "image":
            chunk.image.data, chunk.image.expected_tokens = draw(SMALL), 2**31 - 1
        elif kind == "dmel":
            chunk.dmel.dmel = draw(SMALL)
    for name in draw(usually(["target_tokens", "weights"], st.lists(NAMES, max_size=4))):
        datum.loss_fn_inputs[name].CopyFrom(draw(tensors(name, num_tokens, columns)))
    return datum


@st.composite
def messages(draw: st.DrawFn) -> pb.ForwardBackwardRequest:
    """Without the model and its number."""
    loss_fn = draw(usually("cross_entropy", LOSSES))
    message = pb.ForwardBackwardRequest(loss_fn=loss_fn, forward_only=draw(st.booleans()))
    message.data.extend(draw(st.lists(data(), min_size=1, max_size=2)))
    for key in draw(usually([], st.lists(st.sampled_from(["clip_low_threshold", "beta", ""]), max_size=2))):
        message.loss_fn_config[key] = draw(st.floats())
        message.loss_fn_config_v2[key].text = "x"
    return message


def truncated(at: float) -> Mutation:
    return lambda body: body[: int(at * len(body))]


def overwritten(at: float, by: bytes) -> Mutation:
    return lambda body: body[: int(at * len(body))] + by + body[int(at * len(body)) + len(by) :]


def inserted(at: float, what: bytes) -> Mutation:
    return lambda body: body[: int(at * len(body))] + what + body[int(at * len(body)) :]


def repeated(at: float, length: int, times: int) -> Mutation:
    def mutate(body: bytes) -> bytes:
        start = int(at * len(body))
        return body[:start] + body[start : start + length] * times + body[start + length :]

    return mutate


def nested(depth: int, tag: int) -> Mutation:
    """A message in a message in a message, which ends a parser that recurses."""

    def mutate(body: bytes) -> bytes:
        inner = b""
        for _ in range(depth):
            inner = varint(tag) + varint(len(inner)) + inner
        return body + inner

    return mutate


PLACES = st.floats(0, 1)
SKIPS = usually(0, st.sampled_from([1, -1]))
MUTATIONS = st.one_of(
    st.builds(truncated, PLACES),
    st.builds(overwritten, PLACES, SMALL),
    st.builds(inserted, PLACES, st.builds(varint, INT64)),
    st.builds(inserted, PLACES, st.builds(lambda tag, value: varint(tag) + varint(value), TAGS, INT64)),
    st.builds(inserted, PLACES, st.sampled_from([b"\x1a\x00" * 5000, b"\xff" * 12, bytes(100)])),
    st.builds(repeated, PLACES, st.integers(1, 40), st.sampled_from([2, 3, 500])),
    st.builds(nested, st.sampled_from([2, 90, 120, 3000]), st.sampled_from([0x1A, 0x0A, 0x12])),
)


@st.composite
def bodies(draw: st.DrawFn) -> tuple[bytes, list[Mutation], bool, int]:
    """Return a body without its head, what is done to the whole, whether it is packed, and the numbers skipped."""
    mutations = draw(st.one_of(st.just([]), st.lists(MUTATIONS, max_size=2)))
    return draw(messages()).SerializeToString(deterministic=True), mutations, draw(st.booleans()), draw(SKIPS)


class Sender:
    """Sends bodies under the numbers of a model, and takes a new model when the old one waits for a number."""

    def __init__(self, properties: Properties) -> None:
        self._properties = properties
        self._attacker = properties.attacker
        self._renew()

    def _renew(self) -> None:
        self._attacker.end_session()
        self._model_id, self._seq_id = self._attacker.new_model(), 1

    def send(self, example: tuple[bytes, list[Mutation], bool, int]) -> None:
        rest, mutations, packed, skip = example
        head = pb.ForwardBackwardRequest(model_id=self._model_id, seq_id=self._seq_id + skip)
        body = head.SerializeToString() + rest
        for mutate in mutations:
            body = mutate(body)
        content = wire_bodies.packed(body) if packed else body
        answer = self._properties.check(Request("forward_backward", content, wire_bodies.PROTOBUF, zstd=packed))
        self._go_on(answer, mutations, skip)

    def _go_on(self, answer: Answer, mutations: list[Mutation], skip: int) -> None:
        """Whether the number was used up shows in the next request: a valid one must run."""
        if answer.request_id is None or mutations or skip:
            self._renew()
        else:
            self._seq_id += 1


@pytest.mark.parametrize("form", FORMS)
def test_damaged_passes_fail_alone(form: Form, tmp_path: Path) -> None:
    with fuzzed_server(form, tmp_path) as (url, pids), Properties(url, pids) as properties:
        sender, began, number = Sender(properties), time.monotonic(), 0
        while number == 0 or time.monotonic() - began < form.seconds:
            examples_of(bodies(), sender.send, form.of(25), number)
            number += 1
        properties.check_neighbour()
        properties.check_memory()
        print(f"\n{properties.summary}, {number} seeds")
