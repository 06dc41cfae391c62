"""Inflight samplers, over HTTP: all of a model's follow the newest of its inflight saves, and answers say which."""

import asyncio
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import numpy as np
import pytest
import tinker

from tinsmith.builtin import toy_sampling
from tinsmith.builtin.toy_backend import ToyBackend
from tinsmith.protocol.proto import tinker_public_pb2 as pb
from tinsmith.testing.engine_driver import WAIT_S
from tinsmith.testing.harness import RunningServer, running_server
from tinsmith.testing.sdk_data import TOKENS, datum


class Client:
    """A session with one model; numbers its requests."""

    def __init__(self, server: RunningServer, session: str | None = None, number: int = 0) -> None:
        headers = {"X-API-Key": "tml-ann"}
        self.http = httpx.Client(base_url=f"{server.url}/api/v1/", headers=headers, timeout=300)
        self.session = session or self.ok("create_session", tags=[], sdk_version="0.38.0")["session_id"]
        self.model, self.number = f"{self.session}:train:0", number
        if session is None:
            lora = {"rank": 4, "seed": 1}
            self.result("create_model", session_id=self.session, model_seq_id=0, base_model="toy", lora_config=lora)

    def ok(self, path: str, **body: Any) -> Any:
        answer = self.http.post(path, json=body)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def ok_of(self, path: str) -> Any:
        answer = self.http.get(path)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def finished(self, request_id: str) -> httpx.Response:
        while True:
            answer = self.http.post("retrieve_future", json={"request_id": request_id})
            if answer.status_code != 408:
                assert answer.status_code == 200, answer.text
                return answer

    def result(self, path: str, **body: Any) -> Any:
        found = self.finished(self.ok(path, **body)["request_id"]).json()
        assert "error" not in found, found
        return found

    def next(self) -> int:
        self.number += 1
        return self.number

    def train(self) -> None:
        message = pb.ForwardBackwardRequest(model_id=self.model, seq_id=self.next(), loss_fn="cross_entropy")
        learned, sent = datum(TOKENS), message.data.add()
        sent.model_input.add().encoded_text.tokens = np.array(learned.model_input.to_ints(), "<i4").tobytes()
        for name, dtype, number in (("target_tokens", "<i8", pb.DTYPE_INT64), ("weights", "<f4", pb.DTYPE_FLOAT32)):
            sent.loss_fn_inputs[name].dense = learned.loss_fn_inputs[name].to_numpy().astype(dtype).tobytes()
            sent.loss_fn_inputs[name].dtype = number
        headers = {"Content-Type": "application/x-protobuf"}
        answer = self.http.post("forward_backward", content=message.SerializeToString(), headers=headers)
        self.finished(answer.json()["request_id"])
        self.result("optim_step", model_id=self.model, seq_id=self.next(), adam_params={"learning_rate": 0.5})

    def save(self, number: int, kind: str = "inflight") -> str:
        saved = self.result(
            "save_weights_for_sampler",
            model_id=self.model,
            seq_id=self.next(),
            sampling_session_seq_id=number,
            kind=kind,
        )
        return str(saved["sampling_session_id"])

    def sample(self, sampler: str, seq_id: int) -> pb.SampleResponse:
        return self.sampled(self.submit_sample(sampler, seq_id))

    def sampled(self, request_id: str) -> pb.SampleResponse:
        found: pb.SampleResponse = pb.SampleResponse.FromString(self.finished(request_id).content)
        return found

    def submit_sample(self, sampler: str, seq_id: int, *, num_samples: int = 2, max_tokens: int = 3) -> str:
        request = {
            "sampling_session_id": sampler,
            "seq_id": seq_id,
            "num_samples": num_samples,
            "prompt": {"chunks": [{"type": "encoded_text", "tokens": TOKENS}]},
            "sampling_params": {"max_tokens": max_tokens, "seed": 7, "stop": []},
            "prompt_logprobs": True,
        }
        submitted = self.ok("asample", **request)
        assert self.ok("asample", **request) == submitted  # whatever the weights, a repeat is the first request
        return str(submitted["request_id"])


def weights(answer: pb.SampleResponse) -> list[list[tuple[str, int]]]:
    return [[(each.sampling_session_id, each.length) for each in sequence.weights] for sequence in answer.sequences]


def test_samplers_follow_the_newest_save(tmp_path: Path) -> None:
    with running_server(tmp_path) as running:
        client = Client(running)
        old, fixed = client.save(0), client.save(1, "snapshot")
        before, frozen = client.sample(old, 0), client.sample(fixed, 0)
        client.train()
        assert client.sample(old, 1).prompt_logprobs == before.prompt_logprobs  # nothing is saved yet
        new = client.save(2)
        after = client.sample(new, 0)
        assert weights(before) == [[(old, 3)]] * 2
        assert weights(after) == weights(client.sample(old, 2)) == [[(new, 3)]] * 2
        assert before.prompt_logprobs == frozen.prompt_logprobs != after.prompt_logprobs
        assert client.sample(old, 3) == after
        assert client.sample(old, 1).prompt_logprobs == before.prompt_logprobs  # a repeat has its first result
        assert weights(frozen) == [[], []]
        assert client.sample(fixed, 1) == frozen
    with running_server(tmp_path) as running:  # the next engine knows which is the newest
        client = Client(running, client.session, client.number)
        assert client.sample(old, 4) == client.sample(new, 1) == after
        assert client.sample(fixed, 2) == frozen
        client.train()
        newest = client.save(3)
        assert weights(client.sample(old, 5)) == weights(client.sample(new, 2)) == [[(newest, 3)]] * 2


class Pause:
    """Holds the first long sample after some tokens, until it has been moved to other weights."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, tokens: int) -> None:
        self.reached, self._moved = threading.Event(), threading.Event()
        self._left = tokens
        move = ToyBackend.move_samples

        async def moved(toy: ToyBackend, snapshot_id: str, newer_id: str) -> None:
            await move(toy, snapshot_id, newer_id)
            self._moved.set()

        monkeypatch.setattr(ToyBackend, "move_samples", moved)
        monkeypatch.setattr(toy_sampling, "asyncio", SimpleNamespace(sleep=self._after_token))

    async def _after_token(self, delay_s: float) -> None:
        del delay_s
        self._left -= 1
        if self._left == 0:
            self.reached.set()
            assert await asyncio.to_thread(self._moved.wait, WAIT_S), "the running sample was not moved"


def test_each_token_of_a_running_sequence_tells_its_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with running_server(tmp_path) as running:
        client = Client(running)
        models = client.ok_of("get_server_capabilities")["supported_models"]
        assert [each["inflight"] for each in models] == ["between_tokens"]
        old = client.save(0)
        pause = Pause(monkeypatch, 5)
        asked = client.submit_sample(old, 0, num_samples=1, max_tokens=12)
        assert pause.reached.wait(WAIT_S)
        client.train()
        new = client.save(1)
        assert weights(client.sampled(asked)) == [[(old, 5), (new, 7)]]


def test_a_sample_of_the_sdk_goes_on_with_the_next_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with (
        running_server(tmp_path) as running,
        tinker.ServiceClient(base_url=running.url, api_key="tml-ann") as client,
    ):
        model = client.create_lora_training_client(base_model="toy", rank=4, seed=1).result(timeout=WAIT_S)
        frozen = model.save_weights_and_get_sampling_client().result(timeout=WAIT_S)
        sampler = model.save_weights_and_get_sampling_client(kind="inflight").result(timeout=WAIT_S)
        prompt = tinker.ModelInput.from_ints(TOKENS)
        params = tinker.SamplingParams(max_tokens=30, seed=3, stop=[])
        (expected,) = frozen.sample(prompt, 1, params).result(timeout=WAIT_S).sequences
        pause = Pause(monkeypatch, 10)
        sampling = sampler.sample(prompt, 1, params)
        assert pause.reached.wait(WAIT_S)
        model.forward_backward([datum(TOKENS)], "cross_entropy").result(timeout=WAIT_S)
        model.optim_step(tinker.AdamParams(learning_rate=0.5)).result(timeout=WAIT_S)
        model.save_weights_and_get_sampling_client(kind="inflight").result(timeout=WAIT_S)
        (moved,) = sampling.result(timeout=WAIT_S).sequences
        assert moved.logprobs is not None
        assert expected.logprobs is not None
        assert (moved.tokens[:10], moved.logprobs[:10]) == (expected.tokens[:10], expected.logprobs[:10])
        assert moved.logprobs[10] != expected.logprobs[10]
        assert len(moved.tokens) == 30
        (again,) = frozen.sample(prompt, 1, params).result(timeout=WAIT_S).sequences
        assert (again.tokens, again.logprobs) == (expected.tokens, expected.logprobs)


def test_the_sdk_samples_inflight(tmp_path: Path) -> None:
    with (
        running_server(tmp_path) as running,
        tinker.ServiceClient(base_url=running.url, api_key="tml-ann") as client,
    ):
        model = client.create_lora_training_client(base_model="toy", rank=4, seed=1).result(timeout=300)
        first = model.save_weights_and_get_sampling_client(kind="inflight").result(timeout=300)
        prompt = tinker.ModelInput.from_ints(TOKENS)
        before = first.compute_logprobs(prompt).result(timeout=300)
        model.forward_backward([datum(TOKENS)], "cross_entropy").result(timeout=300)
        model.optim_step(tinker.AdamParams(learning_rate=0.5)).result(timeout=300)
        second = model.save_weights_and_get_sampling_client(kind="inflight").result(timeout=300)
        assert first.compute_logprobs(prompt).result(timeout=300) == second.compute_logprobs(prompt).result(timeout=300)
        assert before != second.compute_logprobs(prompt).result(timeout=300)
        named = {"model_id": model.model_id, "seq_id": 9, "path": "x", "kind": "inflight"}
        with httpx.Client(base_url=f"{running.url}/api/v1/", headers={"X-API-Key": "tml-ann"}) as http:
            refused = http.post("save_weights_for_sampler", json=named).json()["request_id"]
            answer = http.post("retrieve_future", json={"request_id": refused}, timeout=300)
        assert "takes no path" in answer.json()["error"]


@pytest.mark.parametrize("kind", ["newest", ""])
def test_other_kinds_are_refused(kind: str, tmp_path: Path) -> None:
    with running_server(tmp_path) as running:
        client = Client(running)
        body = {"model_id": client.model, "seq_id": 1, "sampling_session_seq_id": 0, "kind": kind}
        refused = client.http.post("save_weights_for_sampler", json=body).json()
        assert f"kind {kind!r} is not offered" in client.finished(refused["request_id"]).json()["error"]
