"""The address of a refused request is read from its body, or not at all."""

import pytest

from tinsmith.protocol.proto import tinker_public_pb2 as pb
from tinsmith.protocol.proto_scan import address_of, asks_forward_only


@pytest.mark.parametrize("model_id", ["m", "0123:train:7", "x" * 300])
@pytest.mark.parametrize("seq_id", [1, 127, 128, 300_000, 2**31 - 1])
def test_a_beginning_is_enough(model_id: str, seq_id: int) -> None:
    message = pb.ForwardBackwardRequest(model_id=model_id, seq_id=seq_id)
    address = message.SerializeToString()
    message.loss_fn = "cross_entropy"
    whole = message.SerializeToString()
    assert address_of(whole) == address_of(address) == address_of(address + b"\xff\xff") == (model_id, seq_id)
    assert [address_of(whole[:length]) for length in range(len(address))] == [None] * len(address)


def test_json_states_its_address_anywhere() -> None:
    assert address_of(b'{"path": 3, "seq_id": 7, "model_id": "0123:train:7"}') == ("0123:train:7", 7)


@pytest.mark.parametrize(
    "start",
    [
        b"",
        b"\0" * 100,
        b"\xff" * 100,
        b"\x0a\xff\xff\xff\xff\xff\xffm\x10\x01",
        b"\x0a\x01m\x18\x01",  # another field in the place of seq_id
        b"\x0a\x01m\x10\x00",  # seq_id 0
        b"\x0a\x01m\x10\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01",  # -1
        b"\x0a\x01\xff\x10\x01",
        b'{"model_id": "m", "seq_id": 1',
        b'{"model_id": "m", "seq_id": 0}',
        b'{"model_id": "m", "seq_id": true}',
        b'{"model_id": "m", "seq_id": 2147483648}',
        b'{"model_id": 7, "seq_id": 1}',
        b'{"seq_id": 1}',
        b'[{"model_id": "m", "seq_id": 1}]',
    ],
)
def test_anything_else_is_nobodys(start: bytes) -> None:
    assert address_of(start) is None


@pytest.mark.parametrize("num_data", [0, 1, 1024])
def test_a_whole_body_says_whether_it_changes_a_gradient(num_data: int) -> None:
    message = pb.ForwardBackwardRequest(model_id="m", seq_id=300_000, loss_fn="ppo", loss_fn_config={"a": 0.5})
    for _ in range(num_data):
        message.data.add().model_input.add().encoded_text.tokens = b"1234" * 40
    assert not asks_forward_only(message.SerializeToString())
    message.forward_only = True
    message.loss_fn_config_v2["a"].number = 0.5
    whole = message.SerializeToString()
    assert asks_forward_only(whole)
    assert not any(asks_forward_only(whole[:length]) for length in range(0, len(whole) - 30, max(1, len(whole) // 30)))


@pytest.mark.parametrize(
    "body", [b"", b"{}", b"\xff" * 100, b"\x0b" * 100, b"\x30", b"\x31\x01", b"\x08\x01" * 100_000]
)
def test_what_cannot_be_read_counts_as_a_pass(body: bytes) -> None:
    assert not asks_forward_only(body)
