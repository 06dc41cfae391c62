"""Batched retrieval: one long poll per sampling client tells which samples are finished."""

import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import tinker

from tinsmith.testing.harness import RunningServer, running_server
from tinsmith.testing.sdk_data import wait_until_at_rest

PROMPT = [5, 6, 7]
SAMPLES = 150


@pytest.fixture
def http(toy_server: RunningServer, api_key: str) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=f"{toy_server.url}/api/v1/", headers={"X-API-Key": api_key}, timeout=300) as client:
        yield client


def a_sampler(http: httpx.Client) -> str:
    session = http.post("create_session", json={}).json()["session_id"]
    body = {"session_id": session, "sampling_session_seq_id": 0, "base_model": "toy"}
    return str(http.post("create_sampling_session", json=body).json()["sampling_session_id"])


def submit(http: httpx.Client, sampler: str, seq_id: int) -> str:
    body = {
        "sampling_session_id": sampler,
        "seq_id": seq_id,
        "prompt": {"chunks": [{"type": "encoded_text", "tokens": PROMPT}]},
        "sampling_params": {"max_tokens": 2, "seed": 3},
    }
    return str(http.post("asample", json=body).json()["request_id"])


def poll(http: httpx.Client, sampler: str, *, clone: int = 0, **fields: Any) -> httpx.Response:
    target = {"type": "sampling_session", "sampling_session_id": sampler, "cloned_sampler_id": clone}
    return http.post("retrieve_futures", json={"target": target, "retrieved_request_ids": [], **fields})


def hold_polls_for_ever(server: RunningServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Longer than the settings allow, and than this file's clients wait."""
    context = server.app.state.context
    patient = context.settings.server.model_copy(update={"long_poll_s": 1e6})
    monkeypatch.setattr(context, "settings", context.settings.model_copy(update={"server": patient}))


def test_a_poll_waits_for_completions_and_only_they_move_the_cursor(
    http: httpx.Client, toy_server: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    hold_polls_for_ever(toy_server, monkeypatch)
    sampler = a_sampler(http)
    assert poll(http, sampler, timeout=0.0).json() == {"completions": [], "cursor": 0}
    request_id = submit(http, sampler, 0)
    found = poll(http, sampler).json()
    (completion,) = found["completions"]
    assert (found["cursor"], completion["state"], completion["request_id"]) == (1, "finished", request_id)
    assert completion["response_payload_uncompressed_size"] > 0
    acknowledged = poll(http, sampler, prev_cursor=1, timeout=0.0, retrieved_request_ids=[request_id]).json()
    assert acknowledged == {"completions": [], "cursor": 1}
    assert poll(http, sampler, prev_cursor=1, timeout=0.05).json() == {"completions": [], "cursor": 1}
    assert poll(http, sampler, prev_cursor=0).json() == found
    again = http.post("retrieve_future", json={"request_id": request_id})
    assert again.headers["content-type"] == "application/x-protobuf"


def test_clones_have_cursors_of_their_own(http: httpx.Client) -> None:
    sampler = a_sampler(http)
    mine, clones = submit(http, sampler, 0), submit(http, sampler, 7 * 10**9 + 4)
    for clone, request_id in ((0, mine), (7, clones)):
        found = poll(http, sampler, clone=clone).json()
        assert ([each["request_id"] for each in found["completions"]], found["cursor"]) == ([request_id], 1)


def test_bad_polls_are_refused_by_name(http: httpx.Client, toy_server: RunningServer) -> None:
    sampler = a_sampler(http)
    ahead = poll(http, sampler, prev_cursor=5)
    assert (ahead.status_code, "cursor 5" in ahead.json()["detail"]) == (400, True)
    stranger = httpx.post(
        f"{toy_server.url}/api/v1/retrieve_futures",
        json={"target": {"sampling_session_id": sampler}},
        headers={"X-API-Key": "tml-stranger"},
        timeout=300,
    )
    assert stranger.status_code == 404
    assert sampler in stranger.json()["detail"]
    for fields, name in (({"timeout": -1}, "timeout"), ({"prev_cursor": -1}, "prev_cursor"), ({"clone": -1}, "clone")):
        refused = poll(http, sampler, **fields)
        assert refused.status_code == 422
        assert name in refused.json()["detail"]


def test_failed_and_cancelled_samples_are_announced(tmp_path: Path) -> None:
    with (
        running_server(tmp_path, engines=False) as server,
        httpx.Client(base_url=f"{server.url}/api/v1/", headers={"X-API-Key": "tml-x"}, timeout=300) as http,
    ):
        sampler = a_sampler(http)
        request_id = submit(http, sampler, 0)
        http.post("cancel_future", json={"request_id": request_id})
        found = poll(http, sampler).json()
        assert found == {"completions": [{"state": "failed", "request_id": request_id}], "cursor": 1}
        assert http.post("retrieve_future", json={"request_id": request_id}).json()["category"] == "user"


def test_a_stopping_server_ends_its_polls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with (
        running_server(tmp_path, engines=False) as server,
        httpx.Client(base_url=f"{server.url}/api/v1/", headers={"X-API-Key": "tml-x"}, timeout=300) as http,
    ):
        sampler = a_sampler(http)
        hold_polls_for_ever(server, monkeypatch)
        server.app.state.context.stopping.set()
        assert poll(http, sampler).json() == {"completions": [], "cursor": 0}


def requests_by_path(server: RunningServer) -> Counter[str]:
    """Count the requests that the server has answered."""
    counted: Counter[str] = Counter()
    for metric in server.app.state.context.metrics.requests.collect():
        for sample in metric.samples:
            if sample.name.endswith("_total"):
                counted[sample.labels["route"].rpartition("/")[2]] += int(sample.value)
    return counted


def test_the_sdk_fetches_many_samples_with_few_polls(tmp_path: Path) -> None:
    prompt = tinker.ModelInput.from_ints(PROMPT)
    params = [tinker.SamplingParams(max_tokens=2, seed=number) for number in range(SAMPLES)]
    with (
        running_server(tmp_path, server={"poll_samples_together": "always"}) as server,
        tinker.ServiceClient(base_url=server.url, api_key="tml-x") as client,
    ):
        sampler = client.create_sampling_client(base_model="toy").result(timeout=300)
        futures = [sampler.sample(prompt, 1, each) for each in params]
        answers = [future.result(timeout=300).sequences[0].tokens for future in futures]
        asked = requests_by_path(server)
        assert asked["asample"] == SAMPLES
        assert asked["retrieve_future"] == SAMPLES  # each was finished when it was asked for
        assert 0 < asked["retrieve_futures"] < SAMPLES / 4
        again = sampler.sample(prompt, 1, params[-1]).result(timeout=300)
        assert again.sequences[0].tokens == answers[-1]
        with pytest.raises(tinker.BadRequestError):
            sampler.sample(tinker.ModelInput.from_ints([10**6]), 1, params[0]).result(timeout=300)
        wait_until_at_rest(sampler)


def test_only_clients_that_can_are_told_to_poll_together(toy_server: RunningServer, http: httpx.Client) -> None:
    told = {}
    for version in ("3.10.2", "3.11.7", "3.12.0", "3.13.0rc1", "4.0", "unknown", ""):
        headers = {"x-stainless-runtime-version": version}
        told[version] = http.post("client/config", json={}, headers=headers).json()["sample_use_retrieve_futures"]
    assert [version for version, together in told.items() if together] == ["3.12.0", "3.13.0rc1", "4.0"]
    with tinker.ServiceClient(base_url=toy_server.url, api_key="tml-x") as client:
        before = requests_by_path(toy_server)
        sampler = client.create_sampling_client(base_model="toy").result(timeout=300)
        params = tinker.SamplingParams(max_tokens=2)
        sampler.sample(tinker.ModelInput.from_ints(PROMPT), 1, params).result(timeout=300)
        together = (requests_by_path(toy_server) - before)["retrieve_futures"] > 0
        assert together == (sys.version_info >= (3, 12))
        wait_until_at_rest(sampler)
