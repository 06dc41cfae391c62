"""Copies of checkpoints, and searches of sessions and checkpoints, through the unmodified SDK and by plain HTTP."""

import secrets
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
import tinker
from tinker import types

from tinsmith.testing.harness import RunningServer, running_server
from tinsmith.testing.sdk_data import datum, ragged, step

pytestmark = pytest.mark.filterwarnings("ignore:RestClient.search_sessions is experimental:FutureWarning")

WAIT_S = 300
HOUR = 3600


@pytest.fixture
def model(client: tinker.ServiceClient) -> tinker.TrainingClient:
    model = client.create_lora_training_client(base_model="toy", rank=4, seed=1).result(timeout=WAIT_S)
    step(model, [datum()])
    return model


def http_of(server: RunningServer, key: str) -> httpx.Client:
    return httpx.Client(base_url=f"{server.url}/api/v1/", headers={"X-API-Key": key}, timeout=WAIT_S)


@pytest.fixture
def http(toy_server: RunningServer, api_key: str) -> Iterator[httpx.Client]:
    with http_of(toy_server, api_key) as client:
        yield client


@pytest.fixture
def other(toy_server: RunningServer, api_key: str) -> Iterator[httpx.Client]:
    with http_of(toy_server, f"{api_key}-other") as client:
        yield client


def ok(answer: httpx.Response) -> Any:
    assert answer.status_code == 200, answer.text
    return answer.json()


def losses(model: tinker.TrainingClient) -> list[float]:
    return [step(model, ragged(2, seed)).metrics["loss:sum"] for seed in range(2)]


# Copies ---------------------------------------------------------------------------------------------------------------


def test_a_copy_is_the_checkpoint_and_outlives_it(
    model: tinker.TrainingClient, client: tinker.ServiceClient, rest: tinker.RestClient
) -> None:
    state = model.save_state("mine", user_metadata={"a": "b"}).result(timeout=WAIT_S).path
    snapshot = model.save_weights_for_sampler("mine").result(timeout=WAIT_S).path
    prompt, params = types.ModelInput.from_ints([1, 2, 3]), types.SamplingParams(max_tokens=8, seed=3)
    expected = client.create_sampling_client(model_path=snapshot).result().sample(prompt, 1, params).result()
    copied = rest.copy_weights(state, "archive", ttl_seconds=2 * HOUR).result(timeout=WAIT_S)
    copied_snapshot = rest.copy_weights(snapshot, "archive").result(timeout=WAIT_S)
    found = {each.tinker_path: each for each in rest.list_user_checkpoints().result(timeout=WAIT_S).checkpoints}
    assert found[copied].checkpoint_id == "weights/mine"
    assert found[copied].user_metadata == {"a": "b"}
    assert found[copied].expires_at is not None
    assert found[copied_snapshot].expires_at is None
    assert found[copied].size_bytes == found[state].size_bytes
    run = rest.get_training_run(copied.split("/")[2]).result(timeout=WAIT_S)
    assert (run.base_model, run.lora_rank) == ("toy", 4)
    after = losses(model)
    for path in (state, snapshot):
        rest.delete_checkpoint_from_tinker_path(path).result(timeout=WAIT_S)
    resumed = client.create_training_client_from_state_with_optimizer(copied).result(timeout=WAIT_S)
    assert losses(resumed) == after
    sampled = client.create_sampling_client(model_path=copied_snapshot).result().sample(prompt, 1, params).result()
    assert drawn(sampled) == drawn(expected)


def drawn(response: types.SampleResponse) -> list[tuple[Any, Any]]:
    return [(each.tokens, each.logprobs) for each in response.sequences]


def test_a_service_client_copies_into_its_own_project(
    toy_server: RunningServer, api_key: str, model: tinker.TrainingClient, rest: tinker.RestClient
) -> None:
    state = model.save_state("mine").result(timeout=WAIT_S).path
    archive = tinker.ServiceClient(base_url=toy_server.url, api_key=api_key, project_id="archive")
    copied = archive.copy_weights(state).result(timeout=WAIT_S)
    (session,) = rest.search_sessions(types.SessionSearchRequest(project_ids=["archive"])).result().sessions
    assert copied.startswith(f"tinker://{session.session_id}:train:0/weights/")
    assert session.checkpoints_count == 1
    assert session.status == types.session_status.ClientSessionFinished(
        reason=types.session_status.ClientSessionFinishSuccess(), detail="made for a copy of a checkpoint"
    )


def test_a_repeated_copy_is_the_first_one(
    model: tinker.TrainingClient, http: httpx.Client, rest: tinker.RestClient
) -> None:
    state = model.save_state("mine").result(timeout=WAIT_S).path
    body = {"source_path": state, "destination_project_id": "p"}

    def copy(key: str) -> str:
        return str(ok(http.post("copy_weights", json=body, headers={"X-Idempotency-Key": key}))["tinker_path"])

    with ThreadPoolExecutor(4) as threads:
        (first,) = set(threads.map(copy, ["a"] * 4))
    assert copy("b") != first == copy("a")
    assert len(rest.list_user_checkpoints().result(timeout=WAIT_S).checkpoints) == 3


def test_a_copy_goes_to_a_slot_of_a_session(
    model: tinker.TrainingClient, client: tinker.ServiceClient, http: httpx.Client
) -> None:
    state = model.save_state("mine").result(timeout=WAIT_S).path
    session = model.get_info().model_id.split(":")[0]
    body = {"source_path": state, "session_id": session, "model_seq_id": 7}
    for _ in range(2):
        assert ok(http.post("copy_weights", json=body))["tinker_path"] == f"tinker://{session}:train:7/weights/mine"
    later = model.save_state("later").result(timeout=WAIT_S).path
    for change in ({"source_path": later}, {"model_seq_id": 0}):
        refused = http.post("copy_weights", json={**body, **change})
        assert (refused.status_code, "each needs its own model_seq_id" in refused.text) == (400, True)
    trained = http.post(
        "optim_step", json={"model_id": f"{session}:train:7", "seq_id": 1, "adam_params": {"learning_rate": 0.1}}
    )
    assert trained.status_code == 400, "it cannot be trained on"
    assert client.create_training_client_from_state(f"tinker://{session}:train:7/weights/mine").result(timeout=WAIT_S)


def test_what_cannot_be_copied(http: httpx.Client, model: tinker.TrainingClient) -> None:
    state = model.save_state("mine").result(timeout=WAIT_S).path
    for change, headers, status, words in (
        ({"source_path": "tinker://none:train:0/weights/x"}, {}, 404, "no checkpoint"),
        ({"source_path": "x"}, {}, 400, "not a checkpoint path"),
        ({"ttl_seconds": 1}, {}, 400, "ttl_seconds is 1"),
        ({"destination_project_id": None}, {}, 400, "send either destination_project_id"),
        ({"session_id": "x", "model_seq_id": 0}, {}, 400, "send either destination_project_id"),
        ({"colour": "red"}, {}, 400, "colour"),
        ({"weights_access_token": "x"}, {}, 400, "publish the checkpoint"),
        ({}, {"X-Tinker-Weights-Access-Token": "x"}, 400, "publish the checkpoint"),
    ):
        body: dict[str, object] = {"source_path": state, "destination_project_id": "p", **change}
        refused = http.post("copy_weights", json=body, headers=headers)
        assert (refused.status_code, words in refused.text) == (status, True), refused.text


def test_copies_count_for_quotas(tmp_path: Path) -> None:
    with running_server(tmp_path, quotas={"checkpoints": 2}) as server, http_of(server, "tml-ann") as http:
        client = tinker.ServiceClient(base_url=server.url, api_key="tml-ann")
        model = client.create_lora_training_client(base_model="toy", rank=4).result(timeout=WAIT_S)
        body = {"source_path": model.save_state("a").result().path, "destination_project_id": "p"}
        ok(http.post("copy_weights", json=body))
        refused = http.post("copy_weights", json=body)
        assert (refused.status_code, "quotas.checkpoints" in refused.text) == (400, True), refused.text
        client.close("success").result(timeout=WAIT_S)


# Searches -------------------------------------------------------------------------------------------------------------


def sessions_found(http: httpx.Client, **filters: object) -> list[str]:
    """Go through all pages."""
    found: list[str] = []
    body: dict[str, object] = {**filters}
    while True:
        page = ok(http.post("sessions/search", json=body))
        found += [each["session_id"] for each in page["sessions"]]
        if "next_cursor" not in page:
            return found
        body["cursor"] = page["next_cursor"]


def test_sessions_are_found_by_what_they_are(http: httpx.Client, rest: tinker.RestClient) -> None:
    made = {}
    for name, more in {
        "one": {"display_name": "Big RL run", "user_metadata": {"a": "1", "b": "2"}, "project_id": "p"},
        "two": {"display_name": "big SFT", "user_metadata": {"a": "1"}},
        "three": {},
    }.items():
        made[name] = ok(http.post("create_session", json=more))["session_id"]
    finished = {"reason": {"type": "errored"}, "detail": "it broke"}
    ok(http.post(f"sessions/{made['two']}/finish", json=finished))
    newest_first = [made["three"], made["two"], made["one"]]
    for filters, expected in (
        ({}, newest_first),
        ({"limit": 1}, newest_first),
        ({"limit": 3}, newest_first),
        ({"display_name": "run BIG"}, [made["one"]]),
        ({"display_name": "big", "session_id": made["three"]}, newest_first),
        ({"session_id": made["three"]}, [made["three"]]),
        ({"project_ids": ["p", "q"]}, [made["one"]]),
        ({"project_ids": []}, []),
        ({"user_metadata": {"a": "1"}}, [made["two"], made["one"]]),
        ({"user_metadata": {"a": "1", "b": "2"}}, [made["one"]]),
        ({"statuses": [{"type": "active"}]}, [made["three"], made["one"]]),
        ({"statuses": [{"type": "client_finished"}]}, [made["two"]]),
        ({"statuses": [{"type": "client_finished", "reasons": ["success"]}, {"type": "failed"}]}, []),
        ({"statuses": [{"type": "cancelled"}, {"type": "client_finished", "reasons": ["errored"]}]}, [made["two"]]),
        ({"owner": {"type": "accessible"}}, newest_first),
        ({"owner": {"type": "user", "owner_urns": ["nobody"]}}, []),
    ):
        assert sessions_found(http, **filters) == expected, filters
    request = types.SessionSearchRequest(session_id=made["two"])
    (summary,) = rest.search_sessions(request).result(timeout=WAIT_S).sessions
    assert (summary.display_name, summary.project_id, summary.checkpoints_count) == ("big SFT", "", 0)
    assert isinstance(summary.status, types.session_status.ClientSessionFinished)
    assert (summary.status.reason.type, summary.status.detail) == ("errored", "it broke")


def test_checkpoints_are_found_by_what_they_are(
    model: tinker.TrainingClient, http: httpx.Client, rest: tinker.RestClient
) -> None:
    first = model.save_state("one", user_metadata={"a": "1"}).result(timeout=WAIT_S).path
    second = model.save_weights_for_sampler("one", user_metadata={"a": "1", "b": "2"}).result(timeout=WAIT_S).path
    third = rest.copy_weights(first, "p").result(timeout=WAIT_S)

    def found(**filters: object) -> list[str]:
        paths: list[str] = []
        body: dict[str, object] = {**filters}
        while True:
            page = ok(http.post("checkpoints/search", json=body))
            assert all(each["base_model"] == "toy" for each in page["checkpoints"])
            paths += [each["tinker_path"] for each in page["checkpoints"]]
            if "next_cursor" not in page:
                return paths
            body["cursor"] = page["next_cursor"]

    for filters, expected in (
        ({}, [third, second, first]),
        ({"limit": 1}, [third, second, first]),
        ({"checkpoint_type": "sampler"}, [second]),
        ({"user_metadata": {"a": "1"}}, [third, second, first]),
        ({"user_metadata": {"b": "2"}}, [second]),
        ({"base_models": ["toy"]}, [third, second, first]),
        ({"base_models": []}, []),
        ({"project_ids": ["p"]}, [third]),
        ({"owner": {"type": "user", "owner_urns": ["nobody"]}}, []),
    ):
        assert found(**filters) == expected, filters


def test_a_search_that_makes_no_sense_is_refused(http: httpx.Client) -> None:
    for body, named in (
        ({"limit": 0}, "limit"),
        ({"limit": 201}, "limit"),
        ({"colour": "red"}, "colour"),
        ({"owner": {"type": "everybody"}}, "owner"),
        ({"owner": {"type": "user", "owner_urns": ["x"] * 11}}, "owner_urns"),
        ({"cursor": {"last_created_at": "2026-01-01T00:00:00"}}, "last_created_at"),
    ):
        for route in ("sessions/search", "checkpoints/search"):
            refused = http.post(route, json=body)
            assert (refused.status_code in {400, 422}, named in refused.text) == (True, True), refused.text


# Others' --------------------------------------------------------------------------------------------------------------


def test_others_can_neither_copy_nor_find(
    model: tinker.TrainingClient, http: httpx.Client, other: httpx.Client
) -> None:
    """What is another's answers as what is not there, word for word."""
    state = model.save_state("mine", user_metadata={"a": "1"}).result(timeout=WAIT_S).path
    run = model.get_info().model_id
    owner = ok(http.get(f"training_runs/{run}"))["model_owner"]
    session, absent = run.split(":")[0], secrets.token_hex(16)
    told = []
    for name in (session, absent):
        for body in (
            {"source_path": state.replace(session, name), "destination_project_id": "p"},
            {"source_path": state, "session_id": name, "model_seq_id": 3},
        ):
            refused = other.post("copy_weights", json=body)
            assert refused.status_code == 404
            told.append(refused.text.replace(name, "it").replace(session, "it"))
    assert told[:2] == told[2:]
    for owned in ({"type": "accessible"}, {"type": "user", "owner_urns": [owner]}):
        assert ok(other.post("sessions/search", json={"owner": owned, "session_id": session}))["sessions"] == []
        assert ok(other.post("checkpoints/search", json={"owner": owned}))["checkpoints"] == []
    assert ok(http.post("checkpoints/search", json={"owner": {"type": "user", "owner_urns": [owner]}}))["checkpoints"]
    ok(http.post(f"training_runs/{run}/checkpoints/weights/mine/publish"))
    copied = ok(other.post("copy_weights", json={"source_path": state, "destination_project_id": "p"}))["tinker_path"]
    (listed,) = ok(other.get("checkpoints"))["checkpoints"]
    assert (listed["tinker_path"], listed.get("public", False)) == (copied, False)
    assert http.post("weights_info", json={"tinker_path": copied}).status_code == 404, "the copy is its maker's"
