"""Bad requests, each with a clear typed error, while a neighbour trains as if nothing happened."""

from collections.abc import Callable, Iterator

import httpx
import numpy as np
import pytest
import tinker
from tinker import SamplingParams

from tinsmith.testing.harness import RunningServer
from tinsmith.testing.sdk_data import TOKENS, datum, ragged, rl_datum

Client = tinker.ServiceClient


def _new_model(client: Client, **fields: int) -> tinker.TrainingClient:
    created = client.create_lora_training_client(base_model="toy", **{"rank": 4, "seed": 8, **fields})
    return created.result(timeout=300)


class Neighbour:
    """Trains in its own session while bad requests are answered: what it computes equals what it computed alone."""

    def __init__(self, client: Client, alone: list[float]) -> None:
        self._model = _new_model(client)
        self._alone = alone
        self._passes: list[tinker.APIFuture[tinker.ForwardBackwardOutput]] = []

    def send_a_step(self) -> None:
        """Do not wait for it."""
        self._passes.append(send_a_step(self._model, seed=len(self._passes)))

    def check(self) -> None:
        assert len(self._passes) >= len(self._alone)
        seen = [each.result(timeout=300).metrics["loss:sum"] for each in self._passes]
        assert seen[: len(self._alone)] == self._alone


def send_a_step(model: tinker.TrainingClient, seed: int) -> tinker.APIFuture[tinker.ForwardBackwardOutput]:
    passed = model.forward_backward(ragged(3, seed), "cross_entropy")
    model.optim_step(tinker.AdamParams(learning_rate=0.01))
    return passed


@pytest.fixture(scope="module")
def alone(toy_server: RunningServer) -> list[float]:
    with tinker.ServiceClient(base_url=toy_server.url, api_key="tml-neighbour") as client:
        model = _new_model(client)
        return [send_a_step(model, seed).result(timeout=300).metrics["loss:sum"] for seed in range(3)]


@pytest.fixture
def neighbour(toy_server: RunningServer, alone: list[float]) -> Iterator[Neighbour]:
    with tinker.ServiceClient(base_url=toy_server.url, api_key="tml-neighbour") as client:
        neighbour = Neighbour(client, alone)
        yield neighbour
        neighbour.check()


def with_inputs(tokens: list[int], **inputs: object) -> tinker.Datum:
    return tinker.Datum(model_input=tinker.ModelInput.from_ints(tokens), loss_fn_inputs=inputs)


def scored(count: int, weight: float = 1.0) -> dict[str, list[float]]:
    return {"target_tokens": [1] * count, "weights": [weight] * count}


BAD_PASSES = {
    "token outside the vocabulary": ([with_inputs([1, 64, 2], **scored(3))], "cross_entropy", "token id 64"),
    "negative token": ([with_inputs([1, -3], **scored(2))], "cross_entropy", "token id -3"),
    "target outside the vocabulary": (
        [with_inputs([1], target_tokens=[2**40], weights=[1.0])],
        "cross_entropy",
        "token id 1099511627776",
    ),
    "empty datum": ([with_inputs([], target_tokens=[], weights=[])], "cross_entropy", "model_input is empty"),
    "targets shorter": ([with_inputs([1, 2, 3], **scored(2))], "cross_entropy", r"target_tokens has shape \[2\]"),
    "targets longer": ([with_inputs([1, 2, 3], **scored(4))], "cross_entropy", r"target_tokens has shape \[4\]"),
    "nan weights": ([with_inputs([1, 2], **scored(2, float("nan")))], "cross_entropy", "weights holds nan"),
    "infinite weights": ([with_inputs([1, 2], **scored(2, float("inf")))], "cross_entropy", "weights holds inf"),
    "missing inputs": ([with_inputs([1, 2], **scored(2))], "ppo", "'advantages' is missing"),
    "an input too many": (
        [with_inputs([1], advantages=[1.0], **scored(1))],
        "cross_entropy",
        "'advantages' is not an input",
    ),
    "unknown loss": ([datum()], "no_such_loss", "loss_fn 'no_such_loss' is not offered"),
    "no mask of the sequence": ([rl_datum(TOKENS, [-1.0] * 6, 1.0)], "gspo", "'clip_high_threshold' is missing"),
    "context too long": ([with_inputs([1] * 513, **scored(513))], "cross_entropy", "513 tokens; the context holds 512"),
    "one bad among good": ([datum(), with_inputs([999], **scored(1)), datum()], "cross_entropy", r"data\[1\]"),
}


def test_bad_passes_fail_alone(client: Client, neighbour: Neighbour) -> None:
    model = _new_model(client)
    for name, (data, loss_fn, words) in BAD_PASSES.items():
        neighbour.send_a_step()
        with pytest.raises(tinker.RequestFailedError, match=words) as failure:
            model.forward_backward(data, loss_fn).result(timeout=300)
        assert failure.value.category == tinker.types.RequestErrorCategory.User, name
    with pytest.raises(tinker.RequestFailedError, match="'beta' is not a setting"):
        model.forward_backward([datum()], "cross_entropy", {"beta": 1.0}).result(timeout=300)
    with pytest.raises(tinker.RequestFailedError, match=r"adam_params\.learning_rate"):  # the SDK sends NaN as null
        model.optim_step(tinker.AdamParams(learning_rate=float("nan"))).result(timeout=300)
    with pytest.raises(tinker.RequestFailedError, match="beta1 is 1"):
        model.optim_step(tinker.AdamParams(beta1=1.0)).result(timeout=300)
    fresh = _new_model(client)
    untouched = [each.forward_backward([datum()], "cross_entropy").result(timeout=300) for each in (model, fresh)]
    assert untouched[0].metrics == untouched[1].metrics  # nothing of the bad ones was added


def test_bad_models_are_refused(client: Client, neighbour: Neighbour) -> None:
    for fields, words in (
        ({"base_model": "gpt-9"}, "no base model named 'gpt-9'"),
        ({"rank": -1}, "rank is -1; allowed: 0"),
        ({"rank": 10_000}, "rank is 10000; allowed: 0"),
    ):
        neighbour.send_a_step()
        with pytest.raises(tinker.BadRequestError, match=words):
            client.create_lora_training_client(**{"base_model": "toy", "rank": 4, **fields}).result(timeout=300)
    with pytest.raises(tinker.NotFoundError, match="no checkpoint"):
        client.create_training_client_from_state("tinker://x:train:0/weights/none").result(timeout=300)
    with pytest.raises(tinker.NotFoundError, match="no checkpoint"):
        client.create_sampling_client(model_path="tinker://x:train:0/sampler_weights/none").result(timeout=300)
    with pytest.raises(tinker.BadRequestError, match="no base model named"):
        client.create_sampling_client(base_model="gpt-9").result(timeout=300)


def test_bad_samples_are_refused(client: Client, neighbour: Neighbour) -> None:
    sampler = client.create_sampling_client(base_model="toy").result(timeout=300)
    prompt = tinker.ModelInput.from_ints(TOKENS)
    for tokens, params, words in (
        ([64], SamplingParams(max_tokens=1), "token id 64"),
        ([-1], SamplingParams(max_tokens=1), "token id -1"),
        ([2**40], SamplingParams(max_tokens=1), "out of range"),
        ([], SamplingParams(max_tokens=1), "prompt is empty"),
        (TOKENS, SamplingParams(max_tokens=0), "max_tokens is 0"),
        (TOKENS, SamplingParams(max_tokens=10_000), "exceeds the model's context window"),
        (TOKENS, SamplingParams(max_tokens=1, temperature=-1.0), "temperature is -1"),
        (TOKENS, SamplingParams(max_tokens=1, top_p=0.0), "top_p is 0"),
        (TOKENS, SamplingParams(max_tokens=1, top_k=0), "top_k is 0"),
        (TOKENS, SamplingParams(max_tokens=1, stop=[9999]), "token id 9999"),
    ):
        neighbour.send_a_step()
        with pytest.raises(tinker.BadRequestError, match=words):
            sampler.sample(tinker.ModelInput.from_ints(tokens), 1, params).result(timeout=300)
    stable = client.create_sampling_client(base_model="toy", record_stability_info=True).result(timeout=300)
    with pytest.raises(tinker.BadRequestError, match="record_stability_info is not offered"):
        stable.sample(prompt, 1, SamplingParams(max_tokens=1)).result(timeout=300)
    for seed in (2**40, 2**63, 2**64 - 1, -5):  # any seed is a good one, and nobody else's business
        sampler.sample(prompt, 1, SamplingParams(max_tokens=1, seed=seed)).result(timeout=300)


def test_garbage_and_wrong_keys(toy_server: RunningServer, neighbour: Neighbour) -> None:
    garbage = np.random.default_rng(1).bytes(10 << 20)
    with httpx.Client(base_url=f"{toy_server.url}/api/v1/", timeout=300) as http:
        for path, media in (("forward_backward", "application/x-protobuf"), ("asample", "application/json")):
            neighbour.send_a_step()
            answer = http.post(path, content=garbage, headers={"X-API-Key": "tml-x", "Content-Type": media})
            assert answer.status_code in {400, 422}
            assert answer.json()["detail"]
        neighbour.send_a_step()
        assert http.post("create_session", json={}, headers={"X-API-Key": "wrong"}).status_code == 401
        assert http.post("create_session", json={}).status_code == 401


def test_a_missing_number_fails_what_waits_behind_it(
    tmp_path_factory: pytest.TempPathFactory, new_http: Callable[[RunningServer], httpx.Client]
) -> None:
    """The gap is named, also in the next step, as what is missing may have been a pass. The model goes on."""
    from tinsmith.testing.harness import running_server

    with running_server(tmp_path_factory.mktemp("gaps"), server={"gap_timeout_s": 0.5, "long_poll_s": 44}) as server:
        http = new_http(server)
        session = http.post("create_session", json={}).json()["session_id"]
        body = {"session_id": session, "model_seq_id": 0, "base_model": "toy", "lora_config": {"rank": 2}}
        created = http.post("create_model", json=body).json()
        assert http.post("retrieve_future", json=created).json() == {"model_id": f"{session}:train:0"}
        submit = {"model_id": created["model_id"], "adam_params": {}}
        late = http.post("optim_step", json={**submit, "seq_id": 2}).json()
        failed = http.post("retrieve_future", json=late).json()
        assert failed["category"] == "user"
        assert "seq_id 1" in failed["error"]
        discarded = http.post("optim_step", json={**submit, "seq_id": 3}).json()
        assert "seq_id 1" in http.post("retrieve_future", json=discarded).json()["error"]
        on = http.post("optim_step", json={**submit, "seq_id": 4}).json()
        assert "metrics" in http.post("retrieve_future", json=on).json()


@pytest.fixture
def new_http() -> Iterator[Callable[[RunningServer], httpx.Client]]:
    made: list[httpx.Client] = []

    def make(server: RunningServer) -> httpx.Client:
        made.append(httpx.Client(base_url=f"{server.url}/api/v1/", headers={"X-API-Key": "tml-x"}, timeout=300))
        return made[-1]

    yield make
    for client in made:
        client.close()
