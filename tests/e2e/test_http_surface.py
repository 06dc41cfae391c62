"""The routes by plain HTTP, without an engine: ids, ownership, repeats, waiting, and every kind of bad body."""

import json
import re
import time
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import zstandard
from fastapi import Response

from tinsmith.operations import Consistency, LoraConfig
from tinsmith.processes.reports import EngineReports
from tinsmith.protocol import bounds
from tinsmith.protocol.proto import tinker_public_pb2 as pb
from tinsmith.server.limits.heavy_work import LargeAnswers
from tinsmith.store import CheckpointRecord, EngineRecord, EngineState
from tinsmith.testing.engine_driver import take_over
from tinsmith.testing.harness import RunningServer, running_server

KEY, OTHER_KEY = {"X-API-Key": "tml-mine"}, {"X-API-Key": "tml-other"}
PROTOBUF = {"Content-Type": "application/x-protobuf"}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    limits = {"long_poll_s": 0.05, "max_request_bytes": 1 << 20}
    with running_server(tmp_path_factory.mktemp("data"), engines=False, server=limits) as running:
        yield running


@pytest.fixture(scope="module")
def http(server: RunningServer) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=f"{server.url}/api/v1/", headers=KEY, timeout=300) as client:
        yield client


def ok(answer: httpx.Response) -> Any:
    assert answer.status_code == 200, answer.text
    return answer.json()


@pytest.fixture
def session(http: httpx.Client) -> str:
    return str(ok(http.post("create_session", json={"tags": [], "sdk_version": "0.38.0"}))["session_id"])


def create_model(http: httpx.Client, session: str, **fields: Any) -> httpx.Response:
    return http.post("create_model", json={**new_model(session), **fields})


def new_model(session: str) -> dict[str, Any]:
    return {"session_id": session, "model_seq_id": 0, "base_model": "toy", "lora_config": {"rank": 4}}


@pytest.fixture
def model(http: httpx.Client, session: str) -> str:
    created = ok(create_model(http, session))
    assert created["model_id"] == f"{session}:train:0"
    return str(created["model_id"])


def forward_backward(model: str, seq_id: int, tokens: list[int] | None = None) -> bytes:
    message = pb.ForwardBackwardRequest(model_id=model, seq_id=seq_id, loss_fn="cross_entropy")
    datum = message.data.add()
    values = tokens or [1, 2, 3]
    datum.model_input.add().encoded_text.tokens = np.array(values, "<i4").tobytes()
    for name, dtype, number in (("target_tokens", "<i8", pb.DTYPE_INT64), ("weights", "<f4", pb.DTYPE_FLOAT32)):
        datum.loss_fn_inputs[name].dense = np.ones(len(values), dtype).tobytes()
        datum.loss_fn_inputs[name].dtype = number
    return message.SerializeToString()


def a_checkpoint(model: str, tenant: str) -> CheckpointRecord:
    return CheckpointRecord(
        path=f"tinker://{model}/weights/x",
        model_id=model,
        tenant=tenant,
        kind="training",
        base_model="toy",
        lora=LoraConfig(rank=4, seed=1),
        created_at=datetime.now(UTC),
        size_bytes=1,
        directory=f"{model}/weights/x",
    )


def test_a_session_begins_with_a_warning_that_nothing_has_loaded(http: httpx.Client) -> None:
    """The SDK prints it."""
    told = ok(http.post("create_session", json={}))
    assert told["warning_message"].startswith("no engine of 'toy' has started yet. Requests wait until it is ready")
    assert "error_message" not in told


# Repeats --------------------------------------------------------------------------------------------------------------


def test_a_session_is_made_once_per_idempotency_key(http: httpx.Client) -> None:
    body = {"tags": [], "user_metadata": {}, "sdk_version": "0.38.0", "type": "create_session"}
    keyed = [http.post("create_session", json=body, headers={"X-Idempotency-Key": key}) for key in ("a", "a", "b")]
    first, again, other = (ok(answer)["session_id"] for answer in keyed)
    assert first == again != other


def test_every_submit_is_idempotent_by_its_number(http: httpx.Client, session: str, model: str) -> None:
    submits = [
        lambda: create_model(http, session),
        lambda: http.post("forward_backward", content=forward_backward(model, 1), headers=PROTOBUF),
        lambda: http.post("optim_step", json={"model_id": model, "seq_id": 2, "adam_params": {"learning_rate": 1e-3}}),
        lambda: http.post("save_weights", json={"model_id": model, "seq_id": 3, "path": "x"}),
        lambda: http.post("save_weights_external", json={"model_id": model, "seq_id": 4, "path": "x"}),
    ]
    for submit in submits:
        assert ok(submit())["request_id"] == ok(submit())["request_id"]


def test_an_ephemeral_save_may_be_repeated_with_another_sampling_number(http: httpx.Client, model: str) -> None:
    body = {"model_id": model, "seq_id": 1, "kind": "snapshot"}
    first, again = (
        ok(http.post("save_weights_for_sampler", json={**body, "sampling_session_seq_id": number})) for number in (0, 1)
    )
    assert first["request_id"] == again["request_id"]


def test_the_same_number_with_other_content_is_refused(http: httpx.Client, model: str) -> None:
    ok(http.post("forward_backward", content=forward_backward(model, 1), headers=PROTOBUF))
    other = http.post("forward_backward", content=forward_backward(model, 1, [4]), headers=PROTOBUF)
    assert other.status_code == 400
    assert "seq_id 1" in other.json()["detail"]


def test_a_repeat_finds_its_request_though_it_would_be_refused_now(
    http: httpx.Client, server: RunningServer, session: str, model: str
) -> None:
    other = ok(create_model(http, session, model_seq_id=1))["model_id"]
    tenant = server.call(server.store.get_run(model)).tenant
    server.call(server.store.add_checkpoint(saved := a_checkpoint(other, tenant)))
    load = {"model_id": model, "seq_id": 1, "path": saved.path, "optimizer": True}
    accepted = ok(http.post("load_weights", json=load))
    ok(http.delete(f"training_runs/{other}/checkpoints/weights/x"))
    assert ok(http.post("load_weights", json=load)) == accepted
    refused = ok(http.post("load_weights", json={**load, "seq_id": 2}))
    assert "no checkpoint" in ok(http.post("retrieve_future", json=refused))["error"]


def test_a_repeated_sample_has_the_same_sequence_ids(http: httpx.Client, session: str) -> None:
    sampler = {"session_id": session, "sampling_session_seq_id": 0, "base_model": "toy"}
    first, again = (ok(http.post("create_sampling_session", json=sampler)) for _ in range(2))
    assert first == again
    assert first["sampling_session_id"] == f"{session}:sample:0"
    sample = {
        "sampling_session_id": first["sampling_session_id"],
        "seq_id": 7_000_000_000,
        "num_samples": 3,
        "prompt": {"chunks": [{"type": "encoded_text", "tokens": [5]}]},
        "sampling_params": {"max_tokens": 2},
    }
    one, two = (ok(http.post("asample", json=sample)) for _ in range(2))
    assert one == two
    assert len(set(one["sample_sequence_ids"])) == 3
    assert ok(http.get(f"samplers/{session}:sample:0")) == {"sampler_id": f"{session}:sample:0", "base_model": "toy"}
    joined = ok(http.post("join_sampling_session", json={"sampling_session_id": f"{session}:sample:0"}))
    assert 1 <= joined["client_counter"] < 2**63 // 10**9


# Waiting --------------------------------------------------------------------------------------------------------------


def test_a_pending_future_says_what_it_waits_for(http: httpx.Client, session: str) -> None:
    request_id = ok(create_model(http, session))["request_id"]
    began = time.monotonic()
    answer = http.post("retrieve_future", json={"request_id": request_id, "allow_metadata_only": True})
    assert answer.status_code == 408
    assert time.monotonic() - began >= 0.025  # it held, for at least half of `long_poll_s`
    body = answer.json()
    assert body["type"] == "try_again"
    assert body["request_id"] == request_id
    assert body["queue_state"] == "paused_capacity"
    assert body["queue_state_reason"] == "no engine of 'toy' has started yet"


def test_a_refused_training_request_keeps_its_number_and_fails_in_its_future(http: httpx.Client, model: str) -> None:
    submitted = ok(http.post("save_weights", json={"model_id": model, "seq_id": 1, "path": "../x"}))
    result = ok(http.post("retrieve_future", json={"request_id": submitted["request_id"]}))
    assert result["category"] == "user"
    assert "'../x' is not allowed" in result["error"]


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("optim_step", {"adam_params": {"learning_rate": None}}),
        ("save_weights", {"path": 3}),
        ("save_weights_for_sampler", {"path": "x", "ttl_seconds": "soon"}),
        ("save_weights_external", {"path": "x", "age_encryption_recipients": "age1"}),
        ("load_weights", {"path": "x", "optimizer": "perhaps"}),
    ],
)
def test_a_training_request_of_the_wrong_form_keeps_its_number_too(
    http: httpx.Client, model: str, path: str, fields: dict[str, Any]
) -> None:
    body = {"model_id": model, "seq_id": 1, **fields}
    submitted = ok(http.post(path, json=body))
    assert submitted == ok(http.post(path, json=body))
    result = ok(http.post("retrieve_future", json={"request_id": submitted["request_id"]}))
    assert result["category"] == "user"
    assert result["error"].startswith("body.")


def test_what_no_sdk_sends_is_refused_by_name_and_counted(
    http: httpx.Client, server: RunningServer, session: str
) -> None:
    answer = create_model(http, session, lora_config={"rank": 4, "alpha": 64})
    assert (answer.status_code, "'lora_config.alpha' (64) is not known" in answer.json()["detail"]) == (400, True)
    model = ok(create_model(http, session, lora_config={"rank": 4, "alpha": 0}))["model_id"]
    step = {"model_id": model, "seq_id": 1, "adam_params": {"amsgrad": True}}
    unknown = forward_backward(model, 2) + b"\x98\x06\x01"
    for number, submitted in (
        (1, http.post("optim_step", json=step)),
        (2, http.post("forward_backward", content=unknown, headers=PROTOBUF)),
    ):
        failed = ok(http.post("retrieve_future", json={"request_id": ok(submitted)["request_id"]}))
        assert (failed["category"], "is not known" in failed["error"]) == ("user", True), number
    stranger = http.post("optim_step", json={**step, "unseen": 1}, headers={"X-API-Key": "no-key"})
    assert stranger.status_code == 401
    shown = httpx.get(f"{server.url}/metrics", timeout=300).text
    for message, field in (("LoraConfig", "alpha"), ("AdamParams", "amsgrad"), ("ForwardBackwardRequest", "99")):
        assert f'tinsmith_unknown_fields_total{{field="{field}",message="{message}"}} 1.0' in shown
    assert "unseen" not in shown


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        (b'"adam_params": {"beta1": 0.1, "beta2" : 0.2, "beta1": 0.3}', "'beta1' is given more than once"),
        (b'"adam_params": {}, "adam_params": {}', "'adam_params' is given more than once"),
        (b'"adam_params": {}, "optimizer_params": {"a": "\\"beta1\\":"}', "optimizer_params: None is not offered"),
        (b'"optimizer_params": {"a": ' + b"[" * 1000 + b"]" * 1000 + b"}", "is nested too deeply"),
    ],
)
def test_a_name_that_comes_twice_is_refused(http: httpx.Client, model: str, fields: bytes, words: str) -> None:
    body = b'{"model_id": "%b", "seq_id": 1, %b}' % (model.encode(), fields)
    sent = http.post("optim_step", content=body, headers={"content-type": "application/json"})
    failed = ok(http.post("retrieve_future", json={"request_id": ok(sent)["request_id"]}))
    assert words in failed["error"]


@pytest.mark.parametrize("levels", [bounds.MAX_LEVELS, 1100])
def test_no_route_reads_a_body_of_too_many_levels(server: RunningServer, levels: int) -> None:
    """Whatever reads it would recurse, and fail in its own way. A numbered request keeps its number."""
    deep, asked = b"[" * levels + b"]" * levels, set()
    with httpx.Client(base_url=server.url, headers={**KEY, "content-type": "application/json"}, timeout=300) as http:
        described = http.get("/openapi.json").json()["paths"]
        for path, method in ((path, method) for path, methods in described.items() for method in methods):
            if "application/json" not in described[path][method].get("requestBody", {}).get("content", {}):
                continue
            body = b'{"model_id": "m", "seq_id": 1, "x": %b}' % deep
            answer = http.request(method, re.sub("{.*?}", "x", path), content=body)
            assert (answer.status_code, "nested too deeply" in answer.text) == (400, True), (path, answer.text)
            asked.add(path)
    assert {"/api/v1/asample", "/api/v1/optim_step", "/v1/chat/completions", "/anthropic/api/v1/messages"} <= asked


def test_a_sample_can_be_cancelled(http: httpx.Client, session: str) -> None:
    ok(
        http.post(
            "create_sampling_session",
            json={"session_id": session, "sampling_session_seq_id": 0, "base_model": "toy"},
        )
    )
    sample = {
        "sampling_session_id": f"{session}:sample:0",
        "seq_id": 0,
        "prompt": {"chunks": [{"type": "encoded_text", "tokens": [5]}]},
        "sampling_params": {"max_tokens": 2},
    }
    request = {"request_id": ok(http.post("asample", json=sample))["request_id"]}
    assert ok(http.post("cancel_future", json=request))["state"] == "cancelled"
    assert ok(http.post("retrieve_future", json=request))["category"] == "user"


# Ownership ------------------------------------------------------------------------------------------------------------


def test_what_belongs_to_others_looks_as_if_it_did_not_exist(
    http: httpx.Client, server: RunningServer, session: str, model: str
) -> None:
    request_id = ok(http.post("optim_step", json={"model_id": model, "seq_id": 1, "adam_params": {}}))["request_id"]
    ok(
        http.post(
            "create_sampling_session",
            json={"session_id": session, "sampling_session_seq_id": 0, "base_model": "toy"},
        )
    )

    tenant = server.call(server.store.get_run(model)).tenant
    server.call(server.store.add_checkpoint(a_checkpoint(model, tenant)))

    def probes(session_id: str, model_id: str, sampler_id: str, request: str) -> list[tuple[str, str, dict[str, Any]]]:
        return [
            ("POST", "session_heartbeat", {"json": {"session_id": session_id}}),
            ("POST", f"sessions/{session_id}/finish", {"json": {"reason": {"type": "success"}}}),
            ("GET", f"sessions/{session_id}", {}),
            (
                "POST",
                "create_model",
                {
                    "json": {
                        "session_id": session_id,
                        "model_seq_id": 5,
                        "base_model": "toy",
                        "lora_config": {"rank": 1},
                    }
                },
            ),
            ("POST", "get_info", {"json": {"model_id": model_id}}),
            ("POST", "forward_backward", {"content": forward_backward(model_id, 9), "headers": PROTOBUF}),
            ("POST", "optim_step", {"json": {"model_id": model_id, "seq_id": 9, "adam_params": {}}}),
            ("GET", f"training_runs/{model_id}", {}),
            ("GET", f"samplers/{sampler_id}", {}),
            ("POST", "retrieve_future", {"json": {"request_id": request}}),
            ("POST", "cancel_future", {"json": {"request_id": request}}),
            ("POST", "unload_model", {"json": {"model_id": model_id}}),
            *checkpoint_probes(session_id, model_id),
        ]

    def checkpoint_probes(session_id: str, model_id: str) -> list[tuple[str, str, dict[str, Any]]]:
        path, place = f"tinker://{model_id}/weights/x", f"training_runs/{model_id}/checkpoints/weights/x"
        mine = ok(http.post("create_session", json={}, headers=OTHER_KEY))["session_id"]
        own_slot, slot = ({"session_id": each, "model_seq_id": 9} for each in (mine, session_id))
        return [
            ("POST", "weights_info", {"json": {"tinker_path": path}}),
            (
                "POST",
                "load_weights",
                {"json": {"path": path, "optimizer": True, **own_slot}},
            ),
            ("POST", "copy_weights", {"json": {"source_path": path, "destination_project_id": "p"}}),
            ("POST", "copy_weights", {"json": {"source_path": path, **slot}}),
            ("GET", f"training_runs/{model_id}/checkpoints", {}),
            ("GET", f"{place}/external_weights_urls", {}),
            ("GET", f"{place}/archive", {}),
            ("POST", f"{place}/publish", {}),
            ("DELETE", f"{place}/publish", {}),
            ("PUT", f"{place}/ttl", {"json": {"ttl_seconds": None}}),
            ("DELETE", place, {}),
        ]

    theirs = probes(session, model, f"{session}:sample:0", request_id)
    nobodys = probes("s0", "s0:train:0", "s0:sample:0", "r0")
    for (method, path, body), (_, missing_path, missing_body) in zip(theirs, nobodys, strict=True):
        body["headers"] = missing_body["headers"] = {**OTHER_KEY, **body.get("headers", {})}
        foreign, missing = http.request(method, path, **body), http.request(method, missing_path, **missing_body)
        assert foreign.status_code == missing.status_code == 404, path
        hidden = foreign.json()["detail"]
        for mine, unknown in ((session, "s0"), (request_id, "r0")):
            hidden = hidden.replace(mine, unknown)
        assert hidden == missing.json()["detail"]
    assert session not in ok(http.get("sessions", headers=OTHER_KEY))["sessions"]
    assert ok(http.get("training_runs", headers=OTHER_KEY))["training_runs"] == []
    assert ok(http.get("checkpoints", headers=OTHER_KEY))["checkpoints"] == []


@pytest.mark.parametrize("headers", [{"X-API-Key": ""}, {"X-API-Key": "sk-not-tinker"}])
@pytest.mark.parametrize("path", ["client/config", "create_session", "retrieve_future", "telemetry"])
def test_a_wrong_key_is_a_401(http: httpx.Client, headers: dict[str, str], path: str) -> None:
    answer = http.post(path, json={}, headers=headers)
    assert answer.status_code == 401
    assert "key" in answer.json()["detail"]


# Bad bodies -----------------------------------------------------------------------------------------------------------

JSON_ROUTES = [
    "create_session", "session_heartbeat", "create_model", "get_info", "optim_step", "save_weights",
    "save_weights_for_sampler", "save_weights_external", "load_weights", "weights_info", "create_sampling_session",
    "join_sampling_session", "asample", "retrieve_future", "cancel_future",
]  # fmt: skip


@pytest.mark.parametrize("body", [b"{", b"\xff\xfe", b"[]", b"nul", b'{"model_id": {}}', b"", b'"x"'])
@pytest.mark.parametrize("path", JSON_ROUTES)
def test_malformed_json_is_a_422_with_a_detail(http: httpx.Client, path: str, body: bytes) -> None:
    answer = http.post(path, content=body, headers={"Content-Type": "application/json"})
    if path == "create_session" and answer.status_code == 200:
        return  # every field of it is optional
    assert answer.status_code == 422, answer.text
    assert answer.json()["detail"]


@pytest.mark.parametrize("value", [b'"\\ud800"', b"NaN", b"1e999"], ids=["half a surrogate", "NaN", "inf"])
@pytest.mark.parametrize(
    "body",
    [
        b'{"display_name": %b}',
        b'{"project_id": %b}',
        b'{"user_metadata": {"a": %b}}',
        b'{"user_metadata": {%b: "a"}}',
        b'{"tags": [%b]}',
    ],
)
def test_what_no_answer_could_repeat_is_not_taken(http: httpx.Client, body: bytes, value: bytes) -> None:
    answer = http.post("create_session", content=body % value, headers={"Content-Type": "application/json"})
    assert answer.status_code == 422
    assert answer.json()["detail"].startswith("body is not JSON at byte ")


@pytest.mark.parametrize("path", ["sessions", "training_runs", "checkpoints"])
def test_no_list_is_that_long(http: httpx.Client, path: str) -> None:
    assert http.get(path, params={"offset": 2**63}).status_code == 422


@pytest.mark.parametrize("body", [b"", b"garbage", b"\x0a\xff\xff\xff\xff", bytes(range(256)) * 10])
def test_malformed_protobuf_is_a_400_with_a_detail(http: httpx.Client, body: bytes) -> None:
    answer = http.post("forward_backward", content=body, headers=PROTOBUF)
    assert answer.status_code == 400
    assert "protobuf" in answer.json()["detail"]


def test_a_form_of_body_that_is_not_read_is_a_415_and_says_which_is(http: httpx.Client, model: str) -> None:
    numbered = {"model_id": model, "seq_id": 1}
    for path, sent, header, offered in (
        (
            "forward_backward",
            {"content": b"x", "headers": {"content-type": "text/plain"}},
            "accept",
            "application/x-protobuf, application/json",
        ),
        (
            "optim_step",
            {"content": b"model_id=x", "headers": {"content-type": "text/plain"}},
            "accept",
            "application/json",
        ),
        ("optim_step", {"json": numbered, "headers": {"content-encoding": "gzip"}}, "accept-encoding", "zstd"),
        ("forward_backward", {"content": b"x", "headers": {"content-encoding": "zstd, br"}}, "accept-encoding", "zstd"),
    ):
        answer = http.post(path, **sent)
        assert (answer.status_code, answer.headers[header]) == (415, offered)
        assert all(form in answer.json()["detail"] for form in offered.split(", "))


@pytest.mark.parametrize(
    ("first", "last", "status"),
    [
        ("2026-01-01T00:00:00", "2026-01-02T00:00:00Z", 200),
        ("2026-01-01T02:00:00", "2026-01-01T02:30:00+01:00", 400),  # which is earlier
        ("0001-01-01T00:00:00+05:00", "0001-01-02T00:00:00", 422),
        ("9999-12-31T00:00:00Z", "9999-12-31T23:00:00-05:00", 422),
    ],
)
def test_times_without_a_zone_are_in_utc(http: httpx.Client, first: str, last: str, status: int) -> None:
    window = {"starting_on": first, "ending_before": last}
    assert http.get("billing/usage/events", params=window).status_code == status


@pytest.mark.parametrize("path", ["forward_backward", "create_session", "asample", "no_such_route"])
def test_ten_megabytes_of_garbage_are_refused(http: httpx.Client, path: str) -> None:
    garbage = np.random.default_rng(0).bytes(10 << 20)
    answer = http.post(path, content=garbage, headers=PROTOBUF if path == "forward_backward" else {})
    assert answer.status_code == 413
    assert "1048576" in answer.json()["detail"]


def test_a_packed_body_works_and_a_bomb_does_not(http: httpx.Client, model: str) -> None:
    packed = {**PROTOBUF, "Content-Encoding": "zstd"}
    good = zstandard.compress(forward_backward(model, 1))
    ok(http.post("forward_backward", content=good, headers=packed))
    bomb = zstandard.compress(b"\0" * (8 << 20))
    assert http.post("forward_backward", content=bomb, headers=packed).status_code == 413


def test_a_forward_backward_that_cannot_be_read_keeps_its_number(http: httpx.Client, model: str) -> None:
    """Its beginning says whose it is; what comes after it has not to wait for a number that was refused."""
    packed = {**PROTOBUF, "Content-Encoding": "zstd"}
    large = [number % 50 for number in range(100_000)]
    refusals = (
        (forward_backward(model, 1, large), PROTOBUF, 413, "over the limit of 1048576 bytes"),
        (zstandard.compress(forward_backward(model, 2, large)), packed, 413, "over the limit of 1048576 bytes"),
        (forward_backward(model, 3)[:-5], PROTOBUF, 400, "is not a protobuf ForwardBackwardRequest"),
    )
    for body, headers, status, words in refusals:
        strangers = http.post("forward_backward", content=body, headers={**headers, **OTHER_KEY})
        assert (strangers.status_code, words in strangers.json()["detail"]) == (status, True)
        submitted = ok(http.post("forward_backward", content=body, headers=headers))
        assert submitted == ok(http.post("forward_backward", content=body, headers=headers))
        failed = ok(http.post("retrieve_future", json={"request_id": submitted["request_id"]}))
        assert (failed["category"], words in failed["error"]) == ("user", True)
    for seq_id, (form, words) in enumerate(
        (("text/json", "content-type 'text/json' is not offered"), ("application/json", "Field required")), 4
    ):
        body, headers = json.dumps({"model_id": model, "seq_id": seq_id}), {"Content-Type": form}
        submitted = ok(http.post("forward_backward", content=body, headers=headers))
        failed = ok(http.post("retrieve_future", json={"request_id": submitted["request_id"]}))
        assert words in failed["error"]
    cut = forward_backward(model, 5)[:20]
    assert http.post("forward_backward", content=cut, headers=PROTOBUF).status_code == 400


def test_a_run_says_how_it_is(http: httpx.Client, server: RunningServer, model: str) -> None:
    assert ok(http.get(f"training_runs/{model}"))["state"] == "creating"
    lease = server.call(take_over(server.store, "toy"))
    server.call(server.store.lose_run(lease, model, "the disk burnt"))
    lost = ok(http.get(f"training_runs/{model}"))
    assert (lost["state"], lost["state_reason"], lost["corrupted"]) == ("lost", "the disk burnt", True)


def test_checkpoints_of_a_run_come_in_pages(http: httpx.Client, server: RunningServer, model: str) -> None:
    saved = a_checkpoint(model, tenant=str(server.call(server.store.get_run(model)).tenant))
    for number in range(3):
        at = saved.created_at + timedelta(seconds=number)
        server.call(server.store.add_checkpoint(replace(saved, path=f"{saved.path}{number}", created_at=at)))
    everything = ok(http.get(f"training_runs/{model}/checkpoints"))
    assert [each["checkpoint_id"] for each in everything["checkpoints"]] == [f"weights/x{n}" for n in (2, 1, 0)]
    assert everything["cursor"] == {"offset": 0, "limit": 10_000, "total_count": 3}
    page = ok(http.get(f"training_runs/{model}/checkpoints", params={"limit": 2, "offset": 1}))
    assert page["checkpoints"] == everything["checkpoints"][1:]
    assert page["cursor"]["total_count"] == 3
    assert http.get(f"training_runs/{model}/checkpoints", params={"limit": 10_001}).status_code == 422
    run = ok(http.get(f"training_runs/{model}"))
    assert run["last_checkpoint"] == everything["checkpoints"][0]


def test_unknown_endpoints_have_a_detail(http: httpx.Client) -> None:
    answer = http.post("no_such_thing", json={})
    assert answer.status_code == 404
    assert "no_such_thing" in answer.json()["detail"]
    assert http.get("optim_step").status_code == 405


def test_an_endpoint_that_is_not_offered_says_so_by_name(http: httpx.Client) -> None:
    answer = http.post("forward")
    assert answer.status_code == 400
    assert "/forward is not offered" in answer.json()["detail"]


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"base_model": "gpt-9"}, "no base model named 'gpt-9'; available: 'toy'"),
        ({"lora_config": None}, "lora_config is missing"),
        ({"optimizer_config": {"type": "dimuon", "version": 1}}, "'dimuon' is not offered"),
    ],
)
def test_models_that_cannot_be_are_refused_at_once(
    http: httpx.Client, session: str, fields: dict[str, Any], words: str
) -> None:
    answer = create_model(http, session, **fields)
    assert answer.status_code == 400
    assert words in answer.json()["detail"]


@pytest.mark.parametrize(
    ("fields", "status", "words"),
    [
        ({"path": "tinker://x/weights/y"}, 404, "no checkpoint"),
        ({"path": "nonsense"}, 400, "is not a checkpoint path"),
        ({"path": "tinker://a/weights/../b"}, 400, "is not a checkpoint path"),
        ({"path": "tinker://x/sampler_weights/y"}, 400, "is not a training checkpoint"),
        ({"path": "tinker://x/weights/y", "model_id": "m", "seq_id": 1}, 400, "either session_id and model_seq_id"),
        ({"path": "tinker://x/weights/y", "seq_id": 1}, 400, "either session_id and model_seq_id"),
        ({"path": "tinker://x/weights/y", "weights_access_token": "t"}, 400, "weights_access_token"),
    ],
)
def test_loading_what_is_not_there(
    http: httpx.Client, session: str, fields: dict[str, Any], status: int, words: str
) -> None:
    answer = http.post("load_weights", json={"session_id": session, "model_seq_id": 0, "optimizer": True, **fields})
    assert answer.status_code == status
    assert words in answer.json()["detail"]


# Sessions and service -------------------------------------------------------------------------------------------------


def test_a_session_lives_until_it_is_finished(http: httpx.Client, session: str, model: str) -> None:
    ok(http.post("session_heartbeat", json={"session_id": session}))
    finish = {"reason": {"type": "success"}, "detail": None}
    assert ok(http.post(f"sessions/{session}/finish", json=finish))["ended"] == "success"
    later = {"reason": {"type": "errored"}, "detail": "x"}
    assert ok(http.post(f"sessions/{session}/finish", json=later))["ended"] == "success"
    assert http.post("session_heartbeat", json={"session_id": session}).status_code == 410
    refused = http.post("optim_step", json={"model_id": model, "seq_id": 1, "adam_params": {}})
    assert "has ended" in refused.json()["detail"]
    assert "has ended" in create_model(http, session, model_seq_id=1).json()["detail"]


def test_a_session_shows_what_it_made(http: httpx.Client) -> None:
    body = {"tags": ["t"], "user_metadata": {"a": "b", "n": 3}, "display_name": "me", "sdk_version": "1"}
    session = ok(http.post("create_session", json=body))["session_id"]
    model = ok(create_model(http, session))["model_id"]
    assert ok(http.get(f"sessions/{session}")) == {
        "training_run_ids": [model],
        "sampler_ids": [],
        "user_metadata": {"a": "b", "n": "3"},
        "display_name": "me",
    }
    ok(http.put(f"sessions/{session}/project", json={"project_id": "p1"}))
    assert [run["training_run_id"] for run in ok(http.get("training_runs?project_id=p1"))["training_runs"]] == [model]
    assert session in ok(http.get("sessions?limit=1000"))["sessions"]
    assert ok(http.get(f"sessions/{session}/trace_export"))["status"] == "ready"


def test_large_answers_are_built_in_the_turns_of_their_tenant(
    http: httpx.Client, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """These turns are off the event loop: unit/test_large_answers.py."""
    built: list[str] = []

    async def watched(self: LargeAnswers, tenant: str, *how: Any) -> Response:
        built.append(tenant)
        return await build(self, tenant, *how)

    build = LargeAnswers.build
    monkeypatch.setattr(LargeAnswers, "build", watched)
    ok(http.get(f"sessions/{model.partition(':')[0]}"))
    ok(http.get(f"training_runs/{model}/checkpoints"))
    assert len(built) == 2
    assert len(set(built)) == 1


def test_info_names_the_base_model(http: httpx.Client, model: str) -> None:
    info = ok(http.post("get_info", json={"model_id": model, "type": "get_info"}))
    assert info["model_data"] == {"arch": None, "model_name": "toy", "tokenizer_id": "toy"}
    assert info["lora_rank"] == 4
    assert info["is_lora"]


def test_what_needs_no_engine(server: RunningServer, http: httpx.Client) -> None:
    assert ok(http.get("healthz")) == {"status": "ok"}
    assert ok(httpx.get(f"{server.url}/healthz", timeout=300)) == {"status": "ok"}
    ready = httpx.get(f"{server.url}/readyz", timeout=300)
    assert ready.status_code == 503
    assert ready.json()["engines"] == {"toy": {"state": "starting"}}
    assert ok(http.post("client/config", json={"sdk_version": "0.38.0"}))["pjwt_auth_enabled"] is True
    assert ok(http.post("client/dynamic_config", json={"sdk_version": "0.38.0"}))["sample_cancel_enabled"] is True
    assert ok(http.get("get_server_capabilities")) == {"supported_models": [{"model_name": "toy"}]}
    assert ok(http.post("telemetry", json={"events": [{"event": "X"}], "session_id": "s"})) == {"status": "accepted"}
    assert ok(http.get("auth/apikey/me"))["details"]["org_details"]["name"].startswith("key-")
    metrics = httpx.get(f"{server.url}/metrics", timeout=300).text
    assert 'route="/api/v1/healthz",status="200"' in metrics
    for given, repeated in (("req-1.a", "req-1.a"), ("two words", None), ("x" * 129, None)):
        answer = httpx.get(f"{server.url}/healthz", headers={"x-request-id": given}, timeout=300)
        assert answer.headers.get("x-request-id") == repeated


def test_metrics_say_how_saves_for_sampling_compared(tmp_path: Path) -> None:
    """Counted by the engine's process, kept in the store, shown by the server's."""
    with running_server(tmp_path, engines=False) as server:
        record = EngineRecord(base_model="toy", state=EngineState.READY, updated_at=datetime.now(UTC))
        reports = EngineReports(server.store, server.call(take_over(server.store, "toy")), record)
        good = Consistency(verdict="consistent", num_tokens=94, max_difference=2e-6, mean_difference=5e-7)
        bad = Consistency(verdict="inconsistent", num_tokens=94, max_difference=0.5, mean_difference=0.1)
        for found in (bad, good, good, Consistency(verdict="not compared", reason="why")):
            reports.saved_for_sampling(found)
        server.call(reports.say(EngineState.READY))
        text = httpx.get(f"{server.url}/metrics", timeout=300).text
    for line in (
        'tinsmith_saves_compared_total{base_model="toy",verdict="consistent"} 2.0',
        'tinsmith_saves_compared_total{base_model="toy",verdict="inconsistent"} 1.0',
        'tinsmith_saves_compared_total{base_model="toy",verdict="not compared"} 1.0',
        'tinsmith_consistency_difference_nats{base_model="toy",of="max"} 2e-06',
        'tinsmith_consistency_difference_nats{base_model="toy",of="largest"} 0.5',
    ):
        assert line in text


def test_configured_keys_keep_strangers_out(tmp_path: Path) -> None:
    keys = [{"key": "tml-real", "tenant": "me"}]
    with running_server(tmp_path, engines=False, server={"api_keys": keys}) as server:
        url = f"{server.url}/api/v1/client/config"
        assert httpx.post(url, json={}, headers={"X-API-Key": "tml-real"}, timeout=300).status_code == 200
        assert httpx.post(url, json={}, headers={"X-API-Key": "tml-fake"}, timeout=300).status_code == 401


def test_administrators_see_everybodys_work_where_they_ask(tmp_path: Path) -> None:
    keys = [{"key": "tml-user", "tenant": "user"}, {"key": "tml-root", "tenant": "root", "admin": True}]
    with running_server(tmp_path, engines=False, server={"api_keys": keys}) as server:
        url = f"{server.url}/api/v1"
        user, root = {"X-API-Key": "tml-user"}, {"X-API-Key": "tml-root"}
        session = ok(httpx.post(f"{url}/create_session", json={}, headers=user, timeout=300))["session_id"]
        assert ok(httpx.get(f"{url}/sessions", headers=root, timeout=300)) == {"sessions": []}
        assert ok(httpx.get(f"{url}/sessions?access_scope=accessible", headers=root, timeout=300)) == {
            "sessions": [session]
        }
        assert httpx.get(f"{url}/sessions/{session}", headers=root, timeout=300).status_code == 200
        model = ok(httpx.post(f"{url}/create_model", json=new_model(session), headers=user, timeout=300))["model_id"]
        for path in (f"sessions/{session}", f"training_runs/{model}"):
            for scope, status in (("owned", 404), ("accessible", 200)):
                found = httpx.get(f"{url}/{path}", params={"access_scope": scope}, headers=root, timeout=300)
                assert found.status_code == status
            assert httpx.get(f"{url}/{path}?access_scope=owned", headers=user, timeout=300).status_code == 200
        assert httpx.get(f"{url}/sessions?access_scope=all", headers=root, timeout=300).status_code == 422


def test_administrators_change_nothing_of_others(tmp_path: Path) -> None:
    """They may read it; a change is answered as for anybody else: there is no such thing."""
    keys = [
        {"key": "tml-user", "tenant": "user"},
        {"key": "tml-root", "tenant": "root", "admin": True},
        {"key": "tml-else", "tenant": "else"},
    ]
    with (
        running_server(tmp_path, engines=False, server={"api_keys": keys, "long_poll_s": 0.05}) as server,
        httpx.Client(base_url=f"{server.url}/api/v1/", headers={"X-API-Key": "tml-user"}, timeout=300) as user,
        httpx.Client(base_url=f"{server.url}/api/v1/", headers={"X-API-Key": "tml-root"}, timeout=300) as root,
        httpx.Client(base_url=f"{server.url}/api/v1/", headers={"X-API-Key": "tml-else"}, timeout=300) as other,
    ):
        session = ok(user.post("create_session", json={}))["session_id"]
        created = ok(create_model(user, session))
        model, sampler = created["model_id"], f"{session}:sample:0"
        sampling = {"session_id": session, "sampling_session_seq_id": 0, "base_model": "toy"}
        ok(user.post("create_sampling_session", json=sampling))
        sample = {
            "sampling_session_id": sampler,
            "seq_id": 0,
            "prompt": {"chunks": [{"type": "encoded_text", "tokens": [5]}]},
            "sampling_params": {"max_tokens": 2},
        }
        request = {"request_id": ok(user.post("asample", json=sample))["request_id"]}
        saved = a_checkpoint(model, tenant="user")
        server.call(server.store.add_checkpoint(saved))
        checkpoint = f"training_runs/{model}/checkpoints/weights/x"

        for method, path, body in (
            ("GET", f"sessions/{session}", {}),
            ("GET", f"training_runs/{model}", {}),
            ("GET", f"training_runs/{model}/checkpoints", {}),
            ("GET", f"samplers/{sampler}", {}),
            ("POST", "get_info", {"json": {"model_id": model}}),
            ("POST", "weights_info", {"json": {"tinker_path": saved.path}}),
            ("POST", "retrieve_future", {"json": created}),
        ):
            assert root.request(method, path, **body).status_code in {200, 408}, path
            assert other.request(method, path, **body).status_code == 404, path

        for method, path, body in (
            ("POST", "session_heartbeat", {"json": {"session_id": session}}),
            ("POST", f"sessions/{session}/finish", {"json": {"reason": {"type": "errored"}}}),
            ("PUT", f"sessions/{session}/project", {"json": {"project_id": "p"}}),
            ("POST", "create_model", {"json": {**sampling, "model_seq_id": 5, "lora_config": {"rank": 1}}}),
            ("POST", "forward_backward", {"content": forward_backward(model, 1), "headers": PROTOBUF}),
            ("POST", "optim_step", {"json": {"model_id": model, "seq_id": 1, "adam_params": {}}}),
            ("POST", "optim_step", {"json": {"model_id": model, "seq_id": 1, "adam_params": 5}}),
            ("POST", "save_weights", {"json": {"model_id": model, "seq_id": 1, "path": "y"}}),
            ("POST", "save_weights_for_sampler", {"json": {"model_id": model, "seq_id": 1, "path": "y"}}),
            ("POST", "save_weights_external", {"json": {"model_id": model, "seq_id": 1, "path": "y"}}),
            ("POST", "load_weights", {"json": {"model_id": model, "seq_id": 1, "path": "y", "optimizer": True}}),
            ("POST", "create_sampling_session", {"json": {**sampling, "sampling_session_seq_id": 1}}),
            ("POST", "join_sampling_session", {"json": {"sampling_session_id": sampler}}),
            ("POST", "asample", {"json": {**sample, "seq_id": 1}}),
            ("POST", "cancel_future", {"json": request}),
            ("POST", f"{checkpoint}/publish", {}),
            ("DELETE", f"{checkpoint}/publish", {}),
            ("PUT", f"{checkpoint}/ttl", {"json": {"ttl_seconds": 3600}}),
            ("DELETE", checkpoint, {}),
        ):
            refused, foreign = root.request(method, path, **body), other.request(method, path, **body)
            assert (refused.status_code, refused.json()) == (foreign.status_code, foreign.json()), path
            assert refused.status_code in {404, 422}, path

        assert server.call(server.store.get_session(session)).ended is None
        assert server.call(server.store.get_checkpoint(saved.path)) == saved
        assert ok(user.get(f"training_runs/{model}"))["state"] == "creating"
        ok(user.post("optim_step", json={"model_id": model, "seq_id": 1, "adam_params": {}}))  # its number is free


def test_too_many_waiting_samples_of_one_tenant_get_a_429(tmp_path: Path) -> None:
    with running_server(tmp_path, engines=False, quotas={"pending_samples": 2}) as server:
        statuses: dict[str, list[int]] = {}
        for name in ("one", "two"):
            with httpx.Client(
                base_url=f"{server.url}/api/v1/", headers={"X-API-Key": f"tml-{name}"}, timeout=300
            ) as http:
                session = ok(http.post("create_session", json={}))["session_id"]
                sampler = {"session_id": session, "sampling_session_seq_id": 0, "base_model": "toy"}
                sample = {
                    "sampling_session_id": ok(http.post("create_sampling_session", json=sampler))[
                        "sampling_session_id"
                    ],
                    "prompt": {"chunks": [{"type": "encoded_text", "tokens": [5]}]},
                    "sampling_params": {"max_tokens": 2},
                }
                answers = [http.post("asample", json={**sample, "seq_id": number}) for number in range(3)]
                statuses[name] = [answer.status_code for answer in answers]
        assert statuses == {"one": [200, 200, 429], "two": [200, 200, 429]}


def test_a_finished_session_samples_no_more(http: httpx.Client, session: str) -> None:
    sampler = {"session_id": session, "sampling_session_seq_id": 0, "base_model": "toy"}
    created = ok(http.post("create_sampling_session", json=sampler))
    ok(http.post(f"sessions/{session}/finish", json={"reason": {"type": "success"}}))
    sample = {
        "sampling_session_id": created["sampling_session_id"],
        "seq_id": 0,
        "prompt": {"chunks": [{"type": "encoded_text", "tokens": [5]}]},
        "sampling_params": {"max_tokens": 2},
    }
    answer = http.post("asample", json=sample)
    assert answer.status_code == 400
    assert "has ended" in answer.json()["detail"]
