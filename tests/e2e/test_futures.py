"""Results: kept for repeats, announced where large, gone after their retention."""

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import httpx
import numpy as np
import pytest
import tinker
from tinker.proto.response_conv import deserialize_forward_backward_output

from tinsmith.protocol.proto import tinker_public_pb2 as pb
from tinsmith.server.routes import futures
from tinsmith.testing.harness import RunningServer


@pytest.fixture
def http(toy_server: RunningServer, api_key: str) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=f"{toy_server.url}/api/v1/", headers={"X-API-Key": api_key}, timeout=300) as client:
        yield client


@pytest.fixture
def model_id(http: httpx.Client) -> str:
    session = http.post("create_session", json={}).json()["session_id"]
    body = {"session_id": session, "model_seq_id": 0, "base_model": "toy", "lora_config": {"rank": 2}}
    created = http.post("create_model", json=body).json()
    assert retrieve(http, created["request_id"]).json() == {"model_id": f"{session}:train:0"}
    return str(created["model_id"])


def retrieve(http: httpx.Client, request_id: str, **fields: Any) -> httpx.Response:
    return http.post("retrieve_future", json={"request_id": request_id, **fields})


def forward(http: httpx.Client, model_id: str, seq_id: int = 1) -> str:
    message = pb.ForwardBackwardRequest(model_id=model_id, seq_id=seq_id, loss_fn="cross_entropy", forward_only=True)
    datum = message.data.add()
    datum.model_input.add().encoded_text.tokens = np.arange(5, dtype="<i4").tobytes()
    for name, dtype, number in (("target_tokens", "<i8", pb.DTYPE_INT64), ("weights", "<f4", pb.DTYPE_FLOAT32)):
        datum.loss_fn_inputs[name].dense = np.ones(5, dtype).tobytes()
        datum.loss_fn_inputs[name].dtype = number
    headers = {"Content-Type": "application/x-protobuf"}
    return str(http.post("forward_backward", content=message.SerializeToString(), headers=headers).json()["request_id"])


def test_a_result_can_be_read_again(http: httpx.Client, model_id: str) -> None:
    request_id = forward(http, model_id)
    first, again = (retrieve(http, request_id, allow_metadata_only=True) for _ in range(2))
    assert first.headers["content-type"] == "application/x-protobuf"
    assert first.content == again.content
    assert len(deserialize_forward_backward_output(first.content).loss_fn_outputs) == 1


def test_a_large_result_is_announced_by_its_size(
    http: httpx.Client, model_id: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(futures, "INLINE_BYTES", 10)
    request_id = forward(http, model_id)
    announced = retrieve(http, request_id, allow_metadata_only=True).json()
    assert announced["status"] == "complete_metadata"
    assert announced["response_payload_size"] > 10
    payload = retrieve(http, request_id, allow_metadata_only=False)
    assert payload.headers["content-type"] == "application/x-protobuf"


def test_the_sdk_fetches_a_large_result(client: tinker.ServiceClient, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(futures, "INLINE_BYTES", 10)
    sampler = client.create_sampling_client(base_model="toy").result(timeout=300)
    assert len(sampler.compute_logprobs(tinker.ModelInput.from_ints([1, 2, 3])).result(timeout=300)) == 3


def test_an_expired_result_is_a_410_and_an_unknown_one_a_404(
    http: httpx.Client, model_id: str, toy_server: RunningServer
) -> None:
    kept = forward(http, model_id)
    body = {"session_id": model_id.split(":")[0], "sampling_session_seq_id": 0, "base_model": "toy"}
    sample = {
        "sampling_session_id": http.post("create_sampling_session", json=body).json()["sampling_session_id"],
        "seq_id": 0,
        "prompt": {"chunks": [{"type": "encoded_text", "tokens": [5]}]},
        "sampling_params": {"max_tokens": 2},
    }
    request_id = http.post("asample", json=sample).json()["request_id"]
    assert [retrieve(http, each).status_code for each in (kept, request_id)] == [200, 200]
    toy_server.call(toy_server.store.prune(datetime.now(UTC) + timedelta(seconds=1)))
    assert retrieve(http, kept).status_code == 200  # a recovery of the model may need it
    gone = retrieve(http, request_id)
    assert gone.status_code == 410
    assert "retention" in gone.json()["detail"]
    unknown = retrieve(http, "req-nobody")
    assert unknown.status_code == 404
    assert unknown.json()["detail"]


def test_out_of_order_requests_wait_for_each_other(http: httpx.Client, model_id: str) -> None:
    """Chunks 2 and 3 arrive before chunk 1: all are taken at once, and run when the first is there."""
    third, second = forward(http, model_id, 3), forward(http, model_id, 2)
    first = forward(http, model_id, 1)
    for request_id in (first, second, third):
        assert retrieve(http, request_id).headers["content-type"] == "application/x-protobuf"
