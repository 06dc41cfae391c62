"""Reads a ForwardBackwardRequest: checks it, and leaves its data in the body.

Parsed as a whole, a request would take the memory of its body once more. So each datum is parsed when it is needed, and
freed before the next.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Final

from google.protobuf.message import DecodeError

from tinsmith.errors import UserError
from tinsmith.protocol import bounds
from tinsmith.protocol.proto import tinker_public_pb2 as pb
from tinsmith.protocol.proto_scan import check_elements, check_no_value_is_lost, split_off
from tinsmith.protocol.tensors import MAX_DENSE_ELEMENTS

MAX_DATA: Final = 16_384
MAX_TENSORS: Final = 64
"""Of one datum."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingRequest:
    """A request that `parse` has checked."""

    head: pb.ForwardBackwardRequest  # everything but the data
    data: Sequence[memoryview]  # one message each, in the body
    sparse_elements: int  # of all sparse tensors together, once they are dense

    def datum(self, index: int) -> pb.Datum:
        datum: pb.Datum = pb.Datum.FromString(self.data[index])
        return datum


def parse(body: bytes) -> TrainingRequest:
    """Raises UserError if the body is no ForwardBackwardRequest, or if there is too much in it."""
    try:
        check_elements(body, pb.ForwardBackwardRequest.DESCRIPTOR)
        rest, data = split_off(pb.ForwardBackwardRequest.DATA_FIELD_NUMBER, body)
        head = pb.ForwardBackwardRequest.FromString(rest)
        check_no_value_is_lost(rest, head)
        _check_head(head)
        _check_count("data", len(data), MAX_DATA)
        sparse_elements = 0
        for index, datum in enumerate(data):
            parsed = pb.Datum.FromString(datum)
            check_no_value_is_lost(datum, parsed)
            sparse_elements += _checked(index, parsed)
            _check_count("data: elements of sparse tensors", sparse_elements, MAX_DENSE_ELEMENTS)
    except DecodeError as error:
        msg = f"the body of {len(body)} bytes is not a protobuf ForwardBackwardRequest: {error}"
        raise UserError(msg) from error
    return TrainingRequest(head=head, data=data, sparse_elements=sparse_elements)


def _check_head(head: pb.ForwardBackwardRequest) -> None:
    if not head.model_id or head.seq_id < 1:
        msg = f"model_id {head.model_id!r} or seq_id {head.seq_id} is missing from the protobuf body"
        raise UserError(msg)
    _check_name("model_id", head.model_id)
    _check_name("loss_fn", head.loss_fn)
    for name in (*head.loss_fn_config, *head.loss_fn_config_v2):
        _check_name("loss_fn_config", name)


def _checked(index: int, datum: pb.Datum) -> int:
    """Check how much a datum holds. Return the number of elements of its sparse tensors once they are dense."""
    _check_count(f"data[{index}]: model_input", len(datum.model_input), bounds.MAX_CHUNKS)
    _check_count(f"data[{index}]: loss_fn_inputs", len(datum.loss_fn_inputs), MAX_TENSORS)
    for name, tensor in datum.loss_fn_inputs.items():
        _check_name(f"data[{index}]: loss_fn_inputs", name)
        _check_count(f"data[{index}]: loss_fn_inputs: {name}: shape", len(tensor.shape), bounds.MAX_DIMENSIONS)
    sparse = (each for each in datum.loss_fn_inputs.values() if each.WhichOneof("encoding") == "sparse_csr")
    return sum(abs(prod(each.shape)) for each in sparse)


def _check_count(what: str, count: int, allowed: int) -> None:
    if count > allowed:
        msg = f"{what}: {count} are too many; allowed: {allowed}"
        raise UserError(msg)


def _check_name(what: str, name: str) -> None:
    _check_count(f"{what}: characters of {name[:100]!r}", len(name), bounds.MAX_NAME_CHARS)
    try:
        bounds.plain(name)
    except ValueError as error:
        msg = f"{what}: {name[:100]!r} {error}"
        raise UserError(msg) from error
