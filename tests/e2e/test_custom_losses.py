"""Custom losses through the real SDK: the server computes what the client would, in one request."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import tinker
import torch
import torch.nn.functional as F  # noqa: N812 - as everybody writes it
from tinker import types

from tinsmith.protocol.proto import tinker_public_pb2 as pb
from tinsmith.testing.harness import RunningServer, running_server
from tinsmith.testing.sdk_data import TOKENS, datum, logprobs

WAIT_S = 300
EVEN_STEP = tinker.AdamParams(learning_rate=0.02, eps=1.0)
"""Whose update tells the size of a gradient, and not its sign alone."""
RANKS: dict[str, types.CustomLossInputRank] = {"logprobs": 1, "old": 1, "advantages": 1, "mask": 1, "beta": 0}
Tensor = torch.Tensor
Losses = dict[str, Callable[..., Any]]


def masked_mean(values: Tensor, mask: Tensor) -> Tensor:
    return (values * mask).sum() / torch.clamp(mask.sum(), min=1.0)


def reinforce(logprobs: Tensor, old: Tensor, advantages: Tensor, mask: Tensor, beta: Tensor) -> Any:
    loss = -(logprobs * advantages * mask).sum()
    return loss, {"custom/reinforce:sum": loss}


def ppo(logprobs: Tensor, old: Tensor, advantages: Tensor, mask: Tensor, beta: Tensor) -> Any:
    ratio = torch.exp(logprobs - old)
    clipped = torch.clamp(ratio, 0.8, 1.2)
    outside = ((ratio - clipped).abs() > 0).float()
    loss = -(torch.minimum(ratio * advantages, clipped * advantages) * mask).sum()
    return loss, {"custom/clip_fraction:mean": masked_mean(outside, mask)}


def sequence_ratio(logprobs: Tensor, old: Tensor, advantages: Tensor, mask: Tensor, beta: Tensor) -> Any:
    ratio = torch.exp(masked_mean(logprobs - old, mask))
    return -torch.min(ratio * advantages, ratio.clamp(0.9, 1.1) * advantages).mean(), {"custom/ratio:mean": ratio}


def preference(logprobs: Tensor, old: Tensor, advantages: Tensor, mask: Tensor, beta: Tensor) -> Any:
    """DPO, of a pair that is one datum: tokens of one answer have positive advantages, of the other negative ones."""
    margin = beta * ((logprobs - old) * torch.sign(advantages) * mask).sum()
    return -F.logsigmoid(margin), {"custom/right:mean": (margin > 0).float()}


def entropy_like(logprobs: Tensor, old: Tensor, advantages: Tensor, mask: Tensor, beta: Tensor) -> Any:
    surprise = -(torch.exp(logprobs.detach()) * logprobs)
    return beta * surprise[mask > 0].sum() - logprobs.mean(), {}


def focal(logprobs: Tensor, old: Tensor, advantages: Tensor, mask: Tensor, beta: Tensor) -> Any:
    return -((1 - logprobs.exp()) ** 2 * logprobs * mask).sum(), {"custom/p:mean": logprobs.exp().mean()}


def reverse_kl(logprobs: Tensor, old: Tensor, advantages: Tensor, mask: Tensor, beta: Tensor) -> Any:
    drift = old - logprobs
    return (torch.where(mask > 0, torch.exp(drift) - 1 - drift, 0.0)).sum(), {}


def sharpest(logprobs: Tensor, old: Tensor, advantages: Tensor, mask: Tensor, beta: Tensor) -> Any:
    return torch.logsumexp(-logprobs * 3, dim=0) / 3, {"custom/worst:mean": logprobs.min()}


def standardised(logprobs: Tensor, old: Tensor, advantages: Tensor, mask: Tensor, beta: Tensor) -> Any:
    scaled = (advantages - advantages.mean()) / (advantages.std() + 1e-6)
    return -(scaled * logprobs).sum() / logprobs.shape[0], {}


def returns_to_go(logprobs: Tensor, old: Tensor, advantages: Tensor, mask: Tensor, beta: Tensor) -> Any:
    return -(advantages.flip(0).cumsum(0).flip(0) * logprobs).sum(), {"custom/first:sum": advantages[0]}


def pairwise(logprobs: Tensor, old: Tensor, advantages: Tensor, mask: Tensor, beta: Tensor) -> Any:
    apart = logprobs[:, None] - logprobs[None, :]
    wanted = advantages.unsqueeze(1) > advantages.unsqueeze(0)
    return torch.where(wanted, F.softplus(-apart), 0.0).sum(), {}


def trimmed(logprobs: Tensor, old: Tensor, advantages: Tensor, mask: Tensor, beta: Tensor) -> Any:
    kept, _ = torch.sort(logprobs, descending=True)
    return -kept[1:-1].mean() + torch.stack([logprobs[0], logprobs[-1]]).square().sum() * beta, {}


def squashed(logprobs: Tensor, old: Tensor, advantages: Tensor, mask: Tensor, beta: Tensor) -> Any:
    return (torch.tanh(logprobs) * torch.sigmoid(old).detach()).sum().abs().sqrt() + logprobs.var(), {}


LOSSES = (reinforce, ppo, sequence_ratio, preference, entropy_like, focal, reverse_kl, sharpest, standardised)
MORE_LOSSES = (returns_to_go, pairwise, trimmed, squashed)


def a_batch(seed: int = 0) -> list[tinker.Datum]:
    rng = np.random.default_rng(seed)
    data = []
    for length in (9, 4, 15):
        tokens = rng.integers(0, 60, length + 1)
        inputs = {
            "target_tokens": torch.tensor(tokens[1:]),
            "old": torch.tensor(-rng.exponential(4.0, length), dtype=torch.float32),
            "advantages": torch.tensor(rng.normal(size=length), dtype=torch.float32),
            "mask": torch.tensor(rng.random(length) > 0.3, dtype=torch.float32),
            "beta": types.TensorData(data=[0.1], dtype="float32", shape=[]),
            "logprobs": torch.zeros(length),  # the loss cannot read these
        }
        data.append(tinker.Datum(model_input=tinker.ModelInput.from_ints(tokens[:-1].tolist()), loss_fn_inputs=inputs))
    return data


def scores(model: tinker.TrainingClient, data: list[tinker.Datum]) -> Any:
    """Return the logprobs of all targets."""
    plain = [
        tinker.Datum(
            model_input=each.model_input, loss_fn_inputs={"target_tokens": each.loss_fn_inputs["target_tokens"]}
        )
        for each in data
    ]
    return np.concatenate(logprobs(model.forward(plain, "cross_entropy").result(WAIT_S)))


class Pair:
    """Two models that are alike; the server computes the losses of one, the SDK those of the other."""

    def __init__(self, server: RunningServer, base: str) -> None:
        self.service = tinker.ServiceClient(base_url=server.url, api_key="tml-ann")
        self.here, self.there = (
            self.service.create_lora_training_client(base, rank=4, seed=3).result(WAIT_S) for _ in range(2)
        )

    def expect_agreement(self, function: Callable[..., Any]) -> None:
        handle, data = self.service.create_custom_loss(function, RANKS).result(WAIT_S), a_batch()
        assert handle.loss_id is not None
        passes = (
            self.there.forward_backward_custom(data, handle),
            self.here.forward_backward_custom(data, replace(handle, loss_id=None)),
        )
        steps = [each.optim_step(EVEN_STEP) for each in (self.there, self.here)]
        there, here = (each.result(WAIT_S) for each in passes)
        for each in steps:
            each.result(WAIT_S)
        assert "surrogate_loss:sum" in here.metrics  # it did run in the SDK
        assert "surrogate_loss:sum" not in there.metrics
        for key in {key for key in here.metrics if key.startswith("custom/")} | {"loss:sum"}:
            assert there.metrics[key] == pytest.approx(here.metrics[key], rel=1e-6, abs=1e-6), key
        np.testing.assert_allclose(np.concatenate(logprobs(there)), np.concatenate(logprobs(here)), atol=1e-6)
        after = [scores(each, data) for each in (self.there, self.here)]
        np.testing.assert_allclose(*after, rtol=1e-6, atol=1e-6)
        assert np.abs(after[0] - np.concatenate(logprobs(there))).max() > 1e-3, "the gradient moved nothing"


@pytest.fixture(scope="module")
def pair(toy_server: RunningServer) -> Iterator[Pair]:
    pair = Pair(toy_server, "toy")
    yield pair
    pair.service.close("success").result(WAIT_S)


@pytest.mark.parametrize("function", [*LOSSES, *MORE_LOSSES])
def test_the_server_computes_what_the_sdk_would(pair: Pair, function: Callable[..., Any]) -> None:
    pair.expect_agreement(function)


def test_a_forward_pass_computes_loss_and_metrics(pair: Pair) -> None:
    def mean_logprob(logprobs: Tensor) -> Any:
        return -logprobs.sum(), {"custom/mean:mean": logprobs.mean()}

    handle, data = pair.service.create_custom_loss(mean_logprob, {"logprobs": 1}).result(WAIT_S), a_batch()
    assert handle.loss_id is not None
    before = pair.there.forward(data, "custom", {"loss_id": handle.loss_id}).result(WAIT_S)
    assert before.metrics["loss:sum"] == pytest.approx(-np.concatenate(logprobs(before)).sum(), rel=1e-6)
    assert before.metrics["custom/mean:mean"] == pytest.approx(np.mean([np.mean(each) for each in logprobs(before)]))
    np.testing.assert_array_equal(scores(pair.there, data), np.concatenate(logprobs(before)))


def test_losses_of_several_models_share_a_batch(pair: Pair) -> None:
    """One of them does not fit its data: it fails, and its neighbours do not."""

    def of_nine(logprobs: Tensor) -> Any:
        return logprobs.reshape(3, 3).sum(), {}

    handle, data = pair.service.create_custom_loss(of_nine, {"logprobs": 1}).result(WAIT_S), a_batch()
    passes = [
        pair.there.forward_backward_custom(data[:1], handle),
        pair.here.forward_backward_custom(data, handle),
        pair.there.forward_backward(a_batch()[:1], "custom", {"loss_id": handle.loss_id}),
    ]
    words = r"data\[1\]: custom loss 'of_nine': node 'reshape' \(reshape\): cannot reshape array of size 4"
    assert passes[0].result(WAIT_S).metrics["loss:sum"] == passes[2].result(WAIT_S).metrics["loss:sum"]
    with pytest.raises(tinker.RequestFailedError, match=words):
        passes[1].result(WAIT_S)
    pair.there.optim_step(EVEN_STEP).result(WAIT_S)
    with pytest.raises(tinker.RequestFailedError, match="this step is discarded"):  # its window holds a failed pass
        pair.here.optim_step(EVEN_STEP).result(WAIT_S)


def test_what_the_server_does_not_compute_is_refused_when_it_is_created(pair: Pair) -> None:
    def spectral(logprobs: Tensor) -> Any:
        return torch.fft.fft(logprobs).abs().sum(), {}

    words = r"node 1 'fft_fft' \(call_function 'torch._C._fft.fft_fft'\) is not offered"
    with pytest.raises(tinker.BadRequestError, match=words):
        pair.service.create_custom_loss(spectral, {"logprobs": 1}).result(WAIT_S)


# By plain HTTP --------------------------------------------------------------------------------------------------------

NODES = [
    {"op": "placeholder", "name": "logprobs", "target": "logprobs"},
    {"op": "call_method", "name": "sum_1", "target": "sum", "args": [{"ref": "logprobs"}]},
    {"op": "output", "name": "output", "target": "output", "args": [{"tuple": [{"ref": "sum_1"}, {"dict": {}}]}]},
]


class Client:
    def __init__(self, server: RunningServer, key: str) -> None:
        self.http = httpx.Client(base_url=f"{server.url}/api/v1/", headers={"X-API-Key": key}, timeout=WAIT_S)

    def post(self, path: str, **body: Any) -> httpx.Response:
        return self.http.post(path, json=body)

    def session(self) -> str:
        return str(self.post("create_session").json()["session_id"])

    def create(self, session: str, number: int = 0, nodes: Any = NODES) -> httpx.Response:
        return self.post(
            "create_custom_loss",
            session_id=session,
            custom_loss_seq_id=number,
            name="total",
            inputs=[{"name": "logprobs", "rank": 1}],
            graph={"format": 1, "nodes": nodes},
        )

    def model(self, session: str) -> str:
        lora = {"rank": 2, "seed": 1}
        made = self.post("create_model", session_id=session, model_seq_id=0, base_model="toy", lora_config=lora).json()
        assert self.answer(made).status_code == 200
        return str(made["model_id"])

    def answer(self, submitted: dict[str, Any]) -> httpx.Response:
        while (answer := self.post("retrieve_future", request_id=submitted["request_id"])).status_code == 408:
            pass
        return answer

    def passed(self, model: str, seq_id: int, loss_id: str, *, forward_only: bool = False) -> httpx.Response:
        message = pb.ForwardBackwardRequest(model_id=model, seq_id=seq_id, loss_fn="custom", forward_only=forward_only)
        message.loss_fn_config_v2["loss_id"].text = loss_id
        only = message.data.add()
        only.model_input.add().encoded_text.tokens = np.array(TOKENS, "<i4").tobytes()
        only.loss_fn_inputs["target_tokens"].dense = np.array(TOKENS, "<i8").tobytes()
        only.loss_fn_inputs["target_tokens"].dtype = pb.DTYPE_INT64
        headers = {"Content-Type": "application/x-protobuf"}
        return self.http.post("forward_backward", content=message.SerializeToString(), headers=headers)


def test_a_repeat_is_the_first_request_and_other_content_is_not(toy_server: RunningServer) -> None:
    ann = Client(toy_server, "tml-ann")
    session = ann.session()
    first = ann.create(session)
    assert ann.create(session).json() == first.json() == {"request_id": f"{session}:loss:0"}
    assert ann.answer(first.json()).json() == {"loss_id": f"{session}:loss:0", "type": "create_custom_loss"}
    other = ann.create(session, nodes=[NODES[0], {**NODES[1], "target": "mean"}, NODES[2]])
    assert other.status_code == 400
    assert "exists already" in other.json()["detail"]
    assert ann.create(session, 256).status_code == 422


def test_a_loss_of_another_tenant_or_session_does_not_exist(toy_server: RunningServer) -> None:
    ann, bob = Client(toy_server, "tml-ann"), Client(toy_server, "tml-bob")
    session, theirs = ann.session(), bob.session()
    loss_id, unknown = ann.create(session).json()["request_id"], f"{session}:loss:9"
    mine, model = ann.model(session), bob.model(theirs)
    elsewhere = ann.model(ann.session())
    for seq_id, (who, run, name) in enumerate(
        [(bob, model, loss_id), (bob, model, unknown), (ann, elsewhere, loss_id), (ann, mine, unknown)], 1
    ):
        answer = who.answer(who.passed(run, seq_id if who is bob else 1, name).json()).json()
        assert answer["error"] == f"no custom loss {name!r}"
    for name in (loss_id, unknown):
        answer = bob.post("retrieve_future", request_id=name)
        assert answer.status_code == 404
        assert answer.json()["detail"] == f"no custom loss {name!r}"
    assert bob.create(session).status_code == 404
    assert ann.answer(ann.passed(mine, 2, loss_id).json()).status_code == 200


def test_a_loss_and_its_passes_survive_a_restart(tmp_path: Path) -> None:
    with running_server(tmp_path) as server:
        ann = Client(server, "tml-ann")
        session = ann.session()
        loss_id, model = ann.create(session).json()["request_id"], ann.model(session)
        assert ann.answer(ann.passed(model, 1, loss_id).json()).status_code == 200
        stepped = ann.post("optim_step", model_id=model, seq_id=2, adam_params={"learning_rate": 0.5}).json()
        assert ann.answer(stepped).status_code == 200
        before = ann.answer(ann.passed(model, 3, loss_id, forward_only=True).json()).content
    with running_server(tmp_path) as server:  # whose engine replays the log
        ann = Client(server, "tml-ann")
        assert ann.create(session).json()["request_id"] == loss_id
        assert ann.answer({"request_id": loss_id}).json()["loss_id"] == loss_id
        assert ann.answer(ann.passed(model, 4, loss_id, forward_only=True).json()).content == before


def test_losses_end_with_their_session(toy_server: RunningServer) -> None:
    ann = Client(toy_server, "tml-ann")
    session = ann.session()
    ann.post(f"sessions/{session}/finish", reason={"type": "success"})
    answer = ann.create(session)
    assert answer.status_code == 400
    assert "has ended" in answer.json()["detail"]


def test_a_custom_loss_needs_its_id(pair: Pair) -> None:
    for config, words in (
        ({}, "'loss_id' is missing"),
        ({"loss_id": "total"}, "'total' is no id of a custom loss"),
        ({"loss_id": "s:loss:0", "beta": 1.0}, "'beta' is not a setting of 'custom'"),
    ):
        with pytest.raises(tinker.RequestFailedError, match=words):
            pair.there.forward([datum()], "custom", config).result(WAIT_S)
