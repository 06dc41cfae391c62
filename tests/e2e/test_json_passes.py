"""Passes and results in JSON: the operations of the SDK's protobuf, and the numbers of its results."""

import json
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import tinker
from tinker.proto.request_conv import forward_backward_request_to_proto
from tinker.proto.response_conv import deserialize_forward_backward_output, deserialize_sample_response

from tinsmith.testing.harness import RunningServer

JSON, PROTOBUF = {"Accept": "application/json"}, {"Content-Type": "application/x-protobuf"}
PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "train-with-curl.md"


@pytest.fixture
def http(toy_server: RunningServer, api_key: str) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=f"{toy_server.url}/api/v1/", headers={"X-API-Key": api_key}, timeout=300) as client:
        yield client


@pytest.fixture
def session(http: httpx.Client) -> str:
    return str(http.post("create_session", json={}).json()["session_id"])


@pytest.fixture
def model_id(http: httpx.Client, session: str) -> str:
    body = {"session_id": session, "model_seq_id": 0, "base_model": "toy", "lora_config": {"rank": 2, "seed": 1}}
    created = http.post("create_model", json=body).raise_for_status().json()
    retrieve(http, created["request_id"])
    return str(created["model_id"])


def retrieve(http: httpx.Client, request_id: str, **headers: str) -> httpx.Response:
    while (answer := http.post("retrieve_future", json={"request_id": request_id}, headers=headers)).status_code == 408:
        pass
    return answer.raise_for_status()


def one_datum(**inputs: tinker.TensorData) -> tinker.Datum:
    return tinker.Datum(model_input=tinker.ModelInput.from_ints([1, 2, 3]), loss_fn_inputs=dict(inputs))


def tensor(values: list[Any], dtype: Any, **more: Any) -> tinker.TensorData:
    return tinker.TensorData(data=values, dtype=dtype, **{"shape": [len(values)], **more})


TARGETS = tensor([2, 3, 4], "int64")
CASES: dict[str, tuple[str, dict[str, float], list[tinker.Datum]]] = {
    "cross_entropy": (
        "cross_entropy",
        {},
        [
            one_datum(target_tokens=TARGETS, weights=tensor([0.0, 1.0, 0.1], "float32")),
            one_datum(target_tokens=TARGETS),
        ],
    ),
    "sparse": (
        "cross_entropy",
        {},
        [
            one_datum(
                target_tokens=tensor(
                    [2, 5, 4], "int64", shape=[3, 2], sparse_crow_indices=[0, 2, 2, 3], sparse_col_indices=[0, 1, 1]
                ),
                weights=tensor(
                    [0.5, 0.25, 1.0],
                    "float32",
                    shape=[3, 2],
                    sparse_crow_indices=[0, 2, 2, 3],
                    sparse_col_indices=[0, 1, 1],
                ),
            )
        ],
    ),
    "ppo": (
        "ppo",
        {"clip_low_threshold": 0.9, "clip_high_threshold": 1.1},
        [
            one_datum(
                target_tokens=TARGETS,
                logprobs=tensor([-1.5, -2.0, -3.0], "float32"),
                advantages=tensor([1.0, -1.0, 0.1], "float32"),
            )
        ],
    ),
}


def as_json(request: tinker.types.ForwardBackwardRequest, **more: object) -> dict[str, Any]:
    given = request.forward_backward_input
    data = [
        {
            "model_input": {
                "chunks": [{"type": "encoded_text", "tokens": chunk.tokens} for chunk in each.model_input.chunks]
            },
            "loss_fn_inputs": {
                name: {
                    "data": value.data,
                    "dtype": value.dtype,
                    "shape": value.shape,
                    "sparse_crow_indices": value.sparse_crow_indices,
                    "sparse_col_indices": value.sparse_col_indices,
                }
                for name, value in each.loss_fn_inputs.items()
            },
        }
        for each in given.data
    ]
    inner = {"data": data, "loss_fn": given.loss_fn, "loss_fn_config": dict(given.loss_fn_config or {})}
    return {"model_id": request.model_id, "seq_id": request.seq_id, "forward_backward_input": inner, **more}


def asked(model_id: str, case: str, seq_id: int = 1) -> tinker.types.ForwardBackwardRequest:
    loss_fn, config, data = CASES[case]
    given = tinker.types.ForwardBackwardInput(data=data, loss_fn=loss_fn, loss_fn_config=config or None)
    return tinker.types.ForwardBackwardRequest(forward_backward_input=given, model_id=model_id, seq_id=seq_id)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("forward_only", [False, True])
def test_a_pass_in_json_is_the_sdks_pass(http: httpx.Client, model_id: str, case: str, forward_only: bool) -> None:
    """A repeat in the other form is the same request, so all that both say is the same; and so is the result."""
    request = asked(model_id, case)
    message = forward_backward_request_to_proto(request)
    message.forward_only = forward_only
    first = http.post("forward_backward", json=as_json(request, forward_only=forward_only)).raise_for_status().json()
    again = http.post("forward_backward", content=message.SerializeToString(), headers=PROTOBUF).raise_for_status()
    assert again.json() == first
    answer = retrieve(http, first["request_id"], **JSON)
    assert answer.headers["content-type"] == "application/json"
    found = answer.json()
    expected = deserialize_forward_backward_output(retrieve(http, first["request_id"]).content)
    assert found.keys() == {"loss_fn_output_type", "loss_fn_outputs", "metrics"}
    assert found["metrics"] == expected.metrics
    for datum, theirs in zip(found["loss_fn_outputs"], expected.loss_fn_outputs, strict=True):
        assert datum.keys() == theirs.keys()
        for name, value in theirs.items():
            assert (datum[name]["dtype"], datum[name]["shape"]) == (value.dtype, value.shape)
            assert singles(datum[name]["data"]) == singles(value.data)


def test_what_json_cannot_say_is_refused_and_takes_its_number(http: httpx.Client, model_id: str) -> None:
    for seq_id, (name, wrong, words) in enumerate(
        [
            ("target_tokens", {"data": [2, 3.5, 4]}, "3.5 is no int64"),
            ("weights", {"data": [1, 1, 1e300]}, "too large for float32"),
            ("weights", {"shape": [4]}, "does not hold 3 values"),
            ("weights", {"dtype": "float64"}, "float64"),
            ("weights", {"data": [1, None, 1]}, "NoneType"),
            ("weights", {"sparse": True}, "'forward_backward_input.data[0].loss_fn_inputs.weights.sparse'"),
        ],
        1,
    ):
        body = as_json(asked(model_id, "cross_entropy", seq_id))
        body["forward_backward_input"]["data"][0]["loss_fn_inputs"][name].update(wrong)
        submitted = http.post("forward_backward", json=body).raise_for_status().json()
        failed = retrieve(http, submitted["request_id"], **JSON).json()
        assert failed["category"] == "user"
        assert words in failed["error"], failed
    step = {"model_id": model_id, "seq_id": 7, "adam_params": {"learning_rate": 0.1}}
    stepped = retrieve(http, http.post("optim_step", json=step).json()["request_id"]).json()
    assert "a pass since the last one failed" in stepped["error"]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"model_id": None}, "model_id"),
        ({"seq_id": 0}, "seq_id"),
        ({"forward_backward_input": {"data": [], "loss_fn": "ppo", "loss_fn_config": {"a": True}}}, "loss_fn_config.a"),
        ({"new": 1}, "'new'"),
    ],
)
def test_a_body_of_another_form_is_refused_by_its_field(
    http: httpx.Client, model_id: str, change: dict[str, object], words: str
) -> None:
    answer = http.post("forward_backward", json={**as_json(asked(model_id, "cross_entropy")), **change})
    if answer.status_code == 200:  # recorded under its number
        assert words in retrieve(http, answer.json()["request_id"]).json()["error"]
    else:
        assert answer.status_code in {400, 422}
        assert words in answer.json()["detail"]


@pytest.mark.parametrize("body", [b"", b"[]", b"{", b'{"a": NaN}', b'"text"'])
def test_what_is_no_json_object_is_a_422(http: httpx.Client, body: bytes) -> None:
    answer = http.post("forward_backward", content=body, headers={"Content-Type": "application/json"})
    assert answer.status_code == 422
    assert answer.json()["detail"].startswith("body")


def test_a_refused_forward_in_json_spoils_no_step(http: httpx.Client, model_id: str) -> None:
    body = as_json(asked(model_id, "cross_entropy"), forward_only=True)
    body["forward_backward_input"]["data"][0]["loss_fn_inputs"]["weights"]["data"] = [1.0]
    refused = http.post("forward_backward", json=body).raise_for_status().json()
    assert "error" in retrieve(http, refused["request_id"]).json()
    step = {"model_id": model_id, "seq_id": 2, "adam_params": {"learning_rate": 0.1}}
    assert "metrics" in retrieve(http, http.post("optim_step", json=step).json()["request_id"]).json()


def test_a_sample_in_json_says_what_protobuf_says(http: httpx.Client, session: str) -> None:
    sampler = {"session_id": session, "sampling_session_seq_id": 0, "base_model": "toy"}
    body = {
        "sampling_session_id": http.post("create_sampling_session", json=sampler).json()["sampling_session_id"],
        "seq_id": 0,
        "num_samples": 2,
        "prompt": {"chunks": [{"type": "encoded_text", "tokens": [5, 6, 7]}]},
        "sampling_params": {"max_tokens": 3, "seed": 2, "stop": []},
        "prompt_logprobs": True,
        "topk_prompt_logprobs": 2,
        "topk_sample_logprobs": 2,
        "prompt_alt_tokens_k": 2,
        "target_prompt_logprobs": {
            "data": [7],
            "dtype": "int64",
            "shape": [2, 2],
            "sparse_crow_indices": [0, 1, 1],
            "sparse_col_indices": [1],
        },
    }
    request_id = http.post("asample", json=body).raise_for_status().json()["request_id"]
    found = retrieve(http, request_id, **JSON).json()
    expected = deserialize_sample_response(retrieve(http, request_id).content)
    for sequence, theirs in zip(found["sequences"], expected.sequences, strict=True):
        assert (sequence["tokens"], sequence["stop_reason"]) == (theirs.tokens, theirs.stop_reason)
        assert singles(sequence["logprobs"]) == singles(theirs.logprobs)
        assert pairs(sequence["topk_logprobs"]) == pairs(theirs.topk_logprobs)
    assert found["prompt_logprobs"][0] is None
    assert singles(found["prompt_logprobs"][1:]) == singles((expected.prompt_logprobs or [])[1:])
    assert pairs(found["topk_prompt_logprobs"]) == pairs(expected.topk_prompt_logprobs)
    assert found["topk_prompt_logprobs"][0] is None
    assert found["prompt_cache_hit_tokens"] == expected.prompt_cache_hit_tokens
    for mine, sdk in (
        (found["target_prompt_logprobs"], expected.target_prompt_logprobs),
        (found["prompt_alt_tokens"]["tokens"], expected.prompt_alt_tokens and expected.prompt_alt_tokens.tokens),
        (found["prompt_alt_tokens"]["logprobs"], expected.prompt_alt_tokens and expected.prompt_alt_tokens.logprobs),
    ):
        assert sdk is not None
        assert (mine["dtype"], mine["shape"], mine.get("sparse_col_indices")) == (
            sdk.dtype,
            sdk.shape,
            sdk.sparse_col_indices,
        )
        assert singles(mine["data"]) == singles(sdk.data)


def singles(values: Any) -> list[float]:
    """Return the numbers as float32, which JSON writes with as many digits as it takes to tell it from others."""
    return [float(np.float32(value)) for value in values]


def pairs(rows: Any) -> list[tuple[int, float]]:
    return [(token, round(logprob, 5)) for row in rows for token, logprob in row or ()]


def test_the_page_of_curl_trains_and_samples(toy_server: RunningServer, api_key: str) -> None:
    for program in ("bash", "curl", "jq"):
        if shutil.which(program) is None:
            pytest.skip(f"needs {program}")
    [script] = re.findall(r"^```bash\n(.*?)^```$", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    ran = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", script],
        env={**os.environ, "URL": f"{toy_server.url}/api/v1", "BASE": "toy", "TINKER_API_KEY": api_key},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran
    decoder, answers, rest = json.JSONDecoder(), [], ran.stdout.strip()
    while rest:
        found, end = decoder.raw_decode(rest)
        answers.append(found)
        rest = rest[end:].lstrip()
    created, passed, stepped, sampled, finished = answers
    assert created["model_id"].endswith(":train:0")
    assert len(passed["loss_fn_outputs"][0]["logprobs"]["data"]) == 3
    assert stepped["metrics"]["grad_norm"] > 0
    assert all(1 <= len(sequence["tokens"]) <= 4 for sequence in sampled["sequences"])
    assert finished["ended"] == "success"
