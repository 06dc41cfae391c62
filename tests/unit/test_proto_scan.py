"""Protobuf bodies that are small on the wire and large in memory."""

import numpy as np
import pytest
from google.protobuf.descriptor import Descriptor
from google.protobuf.message import DecodeError

from tinsmith.errors import UserError
from tinsmith.protocol import bounds, proto_scan, training_request
from tinsmith.protocol import tensors as wire_tensors
from tinsmith.protocol.proto import tinker_public_pb2 as pb
from tinsmith.protocol.proto_scan import MAX_ELEMENTS, check_elements
from tinsmith.protocol.unknown_fields import UnknownField, UnknownFieldError

REQUEST = pb.ForwardBackwardRequest.DESCRIPTOR
HEAD = pb.ForwardBackwardRequest(model_id="m", seq_id=1, loss_fn="cross_entropy").SerializeToString()


def length_delimited(number: int, content: bytes) -> bytes:
    return bytes([number << 3 | 2]) + varint(len(content)) + content


def varint(number: int) -> bytes:
    low, rest = number & 0x7F, number >> 7
    return bytes([low | 0x80]) + varint(rest) if rest else bytes([low])


def nest(*numbers: int, content: bytes) -> bytes:
    """Return the content within messages of these field numbers, the outermost first."""
    for number in reversed(numbers):
        content = length_delimited(number, content)
    return content


MANY = 1000
SWOLLEN = {
    "data": HEAD + b"\x1a\x00" * MANY,
    "chunks": HEAD + nest(3, content=b"\x0a\x00" * MANY),
    "chunks of several data": HEAD + nest(3, content=b"\x0a\x00" * (MANY // 4)) * 4,
    "spans": HEAD + nest(3, content=b"\x1a\x00" * MANY),
    "tensors": HEAD + nest(3, content=b"\x12\x00" * MANY),
    "configuration": HEAD + b"\x2a\x00" * MANY,
    "text configuration": HEAD + b"\x3a\x00" * MANY,
    "a packed shape": HEAD + nest(3, 2, 2, 4, content=b"\x00" * MANY),
    "an unpacked shape": HEAD + nest(3, 2, 2, content=b"\x20\x00" * MANY),
    "empty packed shapes": HEAD + nest(3, 2, 2, content=b"\x22\x00" * MANY),
    "unknown fields": HEAD + b"\x78\x00" * MANY,
}


@pytest.mark.parametrize("body", SWOLLEN.values(), ids=SWOLLEN)
def test_many_small_chunks_are_refused(body: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    check_elements(body, REQUEST)
    monkeypatch.setattr(proto_scan, "MAX_ELEMENTS", MANY)
    with pytest.raises(UserError, match="more than 1000 fields"):
        training_request.parse(body)


def test_five_million_empty_data_are_not_built() -> None:
    """These 10 MB took 1.9 GB and 32 s."""
    with pytest.raises(UserError, match=f"more than {MAX_ELEMENTS} fields"):
        training_request.parse(HEAD + b"\x1a\x00" * 5_000_000)


def request(num_data: int = 1, num_tensors: int = 3) -> pb.ForwardBackwardRequest:
    message = pb.ForwardBackwardRequest(model_id="m", seq_id=1, loss_fn="cross_entropy")
    for _ in range(num_data):
        datum = message.data.add()
        datum.model_input.add().encoded_text.tokens = np.ones(100, "<i4").tobytes()
        for name in range(num_tensors):
            tensor = datum.loss_fn_inputs[f"tensor {name}"]
            tensor.dense, tensor.dtype = np.ones(100, "<f4").tobytes(), pb.DTYPE_FLOAT32
            tensor.shape.append(100)
    return message


def test_a_full_request_of_the_sdk_has_far_fewer_parts() -> None:
    check_elements(request(num_data=4 * 1024).SerializeToString(), REQUEST)


@pytest.mark.parametrize(
    "damage",
    [
        b"\x1a",
        b"\x1a\x05ab",
        b"\x1a\x02\x0a\x05",  # a chunk that is longer than its datum
        b"\x80" * 11,
        b"\x0b\x0c",  # a group
        b"\x09\x00",
        b"\x0d\x00",
        b"\x0e",
    ],
)
def test_what_is_no_message_is_refused(damage: bytes) -> None:
    with pytest.raises(DecodeError, match="cut off or unknown"):
        check_elements(HEAD + damage, REQUEST)
    with pytest.raises(UserError, match="is not a protobuf ForwardBackwardRequest"):
        training_request.parse(HEAD + damage)


def test_counts_and_names_of_a_request_are_bounded() -> None:
    data, chunks, tensors, shape = request(num_tensors=0), request(), request(), request()
    data.data.extend([data.data[0]] * training_request.MAX_DATA)
    chunks.data[0].model_input.extend([chunks.data[0].model_input[0]] * bounds.MAX_CHUNKS)
    for number in range(training_request.MAX_TENSORS):
        tensors.data[0].loss_fn_inputs[f"x{number}"].dtype = pb.DTYPE_FLOAT32
    shape.data[0].loss_fn_inputs["tensor 0"].shape.extend([1] * bounds.MAX_DIMENSIONS)
    loss, model, name = request(), request(), request()
    loss.loss_fn, model.model_id = "x" * (bounds.MAX_NAME_CHARS + 1), "m\0"
    name.data[0].loss_fn_inputs["a\nb"].dtype = pb.DTYPE_FLOAT32
    for message, reason in (
        (data, "data: 16385 are too many; allowed: 16384"),
        (chunks, r"data\[0\]: model_input: 4097 are too many"),
        (tensors, r"data\[0\]: loss_fn_inputs: 67 are too many"),
        (shape, r"data\[0\]: loss_fn_inputs: tensor 0: shape: 9 are too many"),
        (loss, r"loss_fn: characters of 'x{100}': 1025 are too many"),
        (model, r"model_id: 'm\\x00' must not hold control characters"),
        (name, r"loss_fn_inputs: 'a\\nb' must not hold control characters"),
    ):
        with pytest.raises(UserError, match=reason):
            training_request.parse(message.SerializeToString())


def test_sparse_tensors_are_counted_together_before_they_are_made_dense() -> None:
    """Twenty requests of 5 KB made hundreds of megabytes each."""
    message, columns = request(num_tensors=0), wire_tensors.MAX_DENSE_ELEMENTS // 2
    for name in "ab":
        tensor = message.data[0].loss_fn_inputs[name]
        tensor.dtype = pb.DTYPE_FLOAT32
        tensor.shape.extend([1, columns])
        tensor.sparse_csr.crow_indices = np.zeros(2, "<i8").tobytes()
    parsed = training_request.parse(message.SerializeToString())
    assert parsed.sparse_elements == wire_tensors.MAX_DENSE_ELEMENTS
    message.data[0].loss_fn_inputs["b"].shape[1] += 1
    with pytest.raises(UserError, match="data: elements of sparse tensors: 16777217 are too many; allowed: 16777216"):
        training_request.parse(message.SerializeToString())


def test_data_are_parsed_as_in_the_whole_message() -> None:
    """Wherever they come: between other fields, and beside fields that are not known and hold nothing."""
    before, after = request(2), pb.ForwardBackwardRequest(forward_only=True)
    after.data.extend(request(3).data)
    unknown = b"\x18\x00" + b"\x1d" + bytes(4) + b"\x7a\x00"  # field 3 as a number, and a field of the future
    body = before.SerializeToString() + unknown + after.SerializeToString()
    whole, parsed = pb.ForwardBackwardRequest.FromString(body), training_request.parse(body)
    assert [parsed.datum(index) for index in range(len(parsed.data))] == list(whole.data)
    assert len(parsed.data) == 5
    del whole.data[:]
    assert parsed.head == whole


# What a parser would pass over ----------------------------------------------------------------------------------------


def messages(message: Descriptor, *above: int) -> dict[str, tuple[int, ...]]:
    """Return the way to every message in a request, by its name: field numbers, the outermost first."""
    found = {message.name: above}
    for field in message.fields:
        if field.message_type is not None:
            found |= messages(field.message_type, *above, field.number)
    return found


@pytest.mark.parametrize(("name", "way"), messages(REQUEST).items())
def test_unknown_fields_of_every_message_are_refused_unless_they_hold_nothing(name: str, way: tuple[int, ...]) -> None:
    for nothing in (
        b"\x98\x06\x00",
        b"\x98\x06\x80\x00",
        b"\x99\x06" + bytes(8),
        b"\x9a\x06\x00",
        b"\x9d\x06" + bytes(4),
    ):
        check_elements(HEAD + nest(*way, content=nothing), REQUEST)
    for something in (b"\x98\x06\x80\x01", b"\x99\x06" + b"\1" * 8, b"\x9a\x06\x01\x00", b"\x9d\x06" + b"\1" * 4):
        with pytest.raises(UnknownFieldError, match=f"field 99 of {name} \\(.* is not known, allowed: 1 ") as refused:
            training_request.parse(HEAD + nest(*way, content=something))
        assert refused.value.fields == (UnknownField(name, "99"),)


def test_a_known_field_of_another_form_is_unknown() -> None:
    for form in (b"\x20\x01", b"\x1d" + b"\1" * 4):  # loss_fn as a number, data as a float
        with pytest.raises(UnknownFieldError):
            training_request.parse(HEAD[:-15] + form)


def tensor(**fields: object) -> bytes:
    return pb.Tensor(**fields).SerializeToString()


def entry(name: str, content: bytes = b"") -> bytes:
    return length_delimited(1, name.encode()) + length_delimited(2, content)


DENSE, SPARSE = tensor(dense=b"1234"), tensor(sparse_csr=pb.SparseCsr(values=b"1234"))
TWICE = {
    "the loss": (HEAD + length_delimited(4, b"ppo"), "ForwardBackwardRequest: loss_fn is given more than once"),
    "an input": (HEAD + nest(3, content=nest(2, content=entry("weights")) * 2), "loss_fn_inputs 'weights' is given"),
    "an input, backwards": (
        HEAD + nest(3, content=nest(2, content=b"\x12\x00" + length_delimited(1, b"weights")) * 2),
        "loss_fn_inputs 'weights' is given",
    ),
    "a setting": (
        HEAD + nest(5, content=entry("beta")[:-2] + b"\x11" + bytes(8)) * 2,
        "loss_fn_config 'beta' is given",
    ),
    "an encoding": (
        HEAD + nest(3, 2, content=entry("weights", DENSE + SPARSE)),
        "Tensor: dense or sparse_csr is given",
    ),
    "a chunk": (
        HEAD + nest(3, 1, content=nest(2, content=b"") + nest(1, content=b"")),
        "encoded_text or image or dmel",
    ),
    "tokens": (HEAD + nest(3, 1, 1, content=b"\x0a\x00\x0a\x04\1\0\0\0"), "EncodedTextChunk: tokens is given"),
}


@pytest.mark.parametrize(("body", "words"), TWICE.values(), ids=TWICE)
def test_several_values_of_one_field_are_refused(body: bytes, words: str) -> None:
    with pytest.raises(UserError, match=words):
        training_request.parse(body)


def test_wasteful_encoders_are_understood() -> None:
    """Numbers that are longer than they need be, zeros that need not be sent, and lists that could be packed."""
    long_shape = b"\x20\x81\x80\x00" + b"\x20\x02" + b"\x18\x00"
    parsed = training_request.parse(HEAD + b"\x30\x00" + nest(3, 2, content=entry("weights", long_shape)))
    assert list(parsed.datum(0).loss_fn_inputs["weights"].shape) == [1, 2]
