"""Training through the unmodified SDK."""

import math
from collections.abc import Callable

import httpx
import numpy as np
import pytest
import tinker
import torch
from chunks import in_chunks_of
from tinker import types

from tinsmith.protocol.proto import tinker_public_pb2 as pb
from tinsmith.testing.harness import RunningServer
from tinsmith.testing.sdk_data import TOKENS, datum, logprobs, ragged, rl_datum, step


@pytest.fixture
def model(client: tinker.ServiceClient) -> tinker.TrainingClient:
    return client.create_lora_training_client(base_model="toy", rank=4, seed=1).result(timeout=300)


def test_the_loss_falls_at_every_step(model: tinker.TrainingClient) -> None:
    losses = [step(model, [datum()]).metrics["loss:sum"] for _ in range(4)]
    assert losses == sorted(losses, reverse=True)
    assert len(set(losses)) == 4
    info = model.get_info()
    assert info.model_data.model_name == "toy"
    assert info.lora_rank == 4


def test_outputs_have_the_shape_of_their_targets(model: tinker.TrainingClient) -> None:
    data = ragged(5)
    output = model.forward_backward(data, "cross_entropy").result(timeout=300)
    assert [len(each) for each in logprobs(output)] == [d.model_input.length for d in data]
    total = -sum(sum(each) for each in logprobs(output))
    assert output.metrics["loss:sum"] == pytest.approx(total, rel=1e-5)


def test_scripts_find_what_hosted_tinker_answers(model: tinker.TrainingClient) -> None:
    """Public scripts read the loss of each target, and the norm before clipping under its name there."""
    weights = [0.5, 0.0, -2.0, 1.0]
    inputs = {"target_tokens": np.array([5, 6, 7, 8]), "weights": np.array(weights, np.float32)}
    data = [types.Datum(model_input=types.ModelInput.from_ints([4, 5, 6, 7]), loss_fn_inputs=inputs)]
    output = model.forward_backward(data, "cross_entropy").result(timeout=300)
    ((scores, losses),) = [
        (each["logprobs"].to_numpy(), each["elementwise_loss"].to_numpy()) for each in output.loss_fn_outputs
    ]
    np.testing.assert_array_equal(losses, -np.array(weights, np.float32) * scores)
    metrics = model.optim_step(types.AdamParams(learning_rate=0.01)).result(timeout=300).metrics
    assert metrics is not None
    assert metrics["unclipped_grad_l2:mean"] == metrics["grad_norm"] > 0


def test_a_batch_cut_into_chunks_is_the_batch(client: tinker.ServiceClient) -> None:
    """The SDK sends chunks 2 to n first, then the first: all arrive, none is lost, and the step is the same."""
    data = ragged(7)
    whole, chunked = (
        client.create_lora_training_client(base_model="toy", rank=4, seed=5).result(timeout=300) for _ in range(2)
    )
    with in_chunks_of(2, chunked):
        first = step(chunked, data)
    expected = step(whole, data)
    np.testing.assert_allclose(np.concatenate(logprobs(first)), np.concatenate(logprobs(expected)), rtol=1e-6)
    assert first.metrics["loss:sum"] == pytest.approx(expected.metrics["loss:sum"], rel=1e-6)
    after = [logprobs(each.forward(data, "cross_entropy").result(timeout=300)) for each in (whole, chunked)]
    np.testing.assert_allclose(np.concatenate(after[0]), np.concatenate(after[1]), rtol=1e-5)


def test_forward_leaves_gradients_alone(client: tinker.ServiceClient) -> None:
    plain, with_forwards = (
        client.create_lora_training_client(base_model="toy", rank=4, seed=2).result(timeout=300) for _ in range(2)
    )
    for model in (plain, with_forwards):
        model.forward_backward([datum()], "cross_entropy").result(timeout=300)
        if model is with_forwards:
            model.forward(ragged(3), "cross_entropy").result(timeout=300)
        model.optim_step(tinker.AdamParams(learning_rate=0.1)).result(timeout=300)
    after = [logprobs(each.forward([datum()], "cross_entropy").result(timeout=300)) for each in (plain, with_forwards)]
    assert after[0] == after[1]


def test_a_custom_loss_has_the_gradient_of_the_loss_it_is(client: tinker.ServiceClient) -> None:
    direct, custom = (
        client.create_lora_training_client(base_model="toy", rank=4, seed=3).result(timeout=300) for _ in range(2)
    )
    weights = [1.0, -2.0, 0.5, 0.0, 1.0, 3.0]

    def loss(data: list[tinker.Datum], outputs: list[torch.Tensor]) -> tuple[torch.Tensor, dict[str, float]]:
        total = -(outputs[0] * torch.tensor(weights)).sum()
        return total, {"mine:sum": 1.0}

    direct.forward_backward([datum(weights=weights)], "cross_entropy").result(timeout=300)
    result = custom.forward_backward_custom([datum()], loss).result(timeout=300)
    assert result.metrics["mine:sum"] == 1.0
    assert "surrogate_loss:sum" in result.metrics
    for model in (direct, custom):
        model.optim_step(tinker.AdamParams(learning_rate=0.1)).result(timeout=300)
    after = [logprobs(each.forward([datum()], "cross_entropy").result(timeout=300)) for each in (direct, custom)]
    np.testing.assert_allclose(after[0], after[1], rtol=1e-5)


def test_cross_entropy_without_weights_counts_every_target_once(client: tinker.ServiceClient) -> None:
    weighted, plain = (
        client.create_lora_training_client(base_model="toy", rank=4, seed=2).result(timeout=300) for _ in range(2)
    )
    prompt = tinker.ModelInput.from_ints(TOKENS)
    for targets in (torch.tensor(TOKENS), torch.tensor([[token, token + 1] for token in TOKENS])):
        without = tinker.Datum(model_input=prompt, loss_fn_inputs={"target_tokens": targets})
        ones = tinker.Datum(
            model_input=prompt, loss_fn_inputs={"target_tokens": targets, "weights": torch.ones(targets.shape)}
        )
        output = step(plain, [without])
        assert output.metrics == step(weighted, [ones]).metrics
        assert output.metrics["loss:sum"] == pytest.approx(-np.sum(logprobs(output)), rel=1e-5)


def test_cross_entropy_without_weights_by_plain_http(toy_server: RunningServer) -> None:
    message = pb.ForwardBackwardRequest(seq_id=1, loss_fn="cross_entropy")
    only = message.data.add()
    only.model_input.add().encoded_text.tokens = np.array(TOKENS, "<i4").tobytes()
    only.loss_fn_inputs["target_tokens"].dense = np.array(TOKENS, "<i8").tobytes()
    only.loss_fn_inputs["target_tokens"].dtype = pb.DTYPE_INT64
    with httpx.Client(base_url=f"{toy_server.url}/api/v1/", headers={"X-API-Key": "tml-plain"}, timeout=300) as http:
        session = http.post("create_session", json={}).json()["session_id"]
        body = {"session_id": session, "model_seq_id": 0, "base_model": "toy", "lora_config": {"rank": 2}}
        message.model_id = http.post("create_model", json=body).json()["model_id"]
        headers = {"Content-Type": "application/x-protobuf"}
        submitted = http.post("forward_backward", content=message.SerializeToString(), headers=headers).json()
        while (answer := http.post("retrieve_future", json=submitted)).status_code == 408:
            pass
    output = pb.ForwardBackwardOutput.FromString(answer.content)
    scores = np.frombuffer(output.loss_fn_outputs[0].fields["logprobs"].data, "<f4")
    assert len(scores) == len(TOKENS)
    assert output.metrics["loss:sum"] == pytest.approx(-scores.sum(), rel=1e-5)


@pytest.mark.parametrize(
    ("loss_fn", "config"),
    [
        ("importance_sampling", None),
        ("ppo", {"clip_low_threshold": 0.9, "clip_high_threshold": 1.1}),
        ("cispo", {"clip_low_threshold": 0.5}),
        ("dro", {"beta": 0.1}),
    ],
)
def test_rl_losses_run(model: tinker.TrainingClient, loss_fn: str, config: dict[str, float] | None) -> None:
    scores = logprobs(model.forward([datum()], "cross_entropy").result(timeout=300))[0]
    output = model.forward_backward([rl_datum(TOKENS, scores, 1.0)], loss_fn, config).result(timeout=300)
    if loss_fn != "dro":
        # at ratio 1 the ratio losses are minus the sum of advantages; cispo's is the sum of -logp
        expected = -sum(scores) if loss_fn == "cispo" else -float(len(scores))
        assert output.metrics["loss:sum"] == pytest.approx(expected, rel=1e-4)
    model.optim_step(tinker.AdamParams()).result(timeout=300)


def test_a_plain_script_corrects_for_its_sampler(client: tinker.ServiceClient) -> None:
    """The corrected pass is that with the weights multiplied into the advantages, bit for bit, and is measured."""
    number = len(TOKENS) - 1
    scores = [-1.0] * number
    rollout = [-1.5, -0.5] + [-1.0] * (number - 2)  # ratios of e^0.5 and e^-0.5
    inputs = {"rollout_logprobs": rollout, "sequence_ratio_mask": [1.0] * number}
    plain, weighted = rl_datum(TOKENS, scores, 1.0), rl_datum(TOKENS, scores, 1.0)
    for name, values in inputs.items():
        plain.loss_fn_inputs[name] = tinker.TensorData(data=values, dtype="float32", shape=[len(values)])
    weights = [1.2, 0.0] + [1.0] * (number - 2)
    weighted.loss_fn_inputs["advantages"] = tinker.TensorData(data=weights, dtype="float32", shape=[len(weights)])
    asked = {"token_tis_ratio_clip_high": 1.2, "token_mask_is_threshold_low": 0.9, "token_mask_is_threshold_high": 2.0}
    after = []
    for datum_, config in ((plain, asked), (weighted, {})):
        model = client.create_lora_training_client(base_model="toy", rank=4, seed=3).result(timeout=300)
        output = model.forward_backward([datum_], "ppo", config).result(timeout=300)
        model.optim_step(tinker.AdamParams(learning_rate=0.1)).result(timeout=300)
        after.append((output.metrics, logprobs(model.forward([datum()], "cross_entropy").result(timeout=300))))
    (corrected, theirs), (uncorrected, others) = after
    assert theirs == others
    assert corrected["loss:sum"] == uncorrected["loss:sum"] != 0.0
    assert corrected["rollout_tokens_clipped:mean"] == corrected["rollout_tokens_masked:mean"] == 1 / number
    assert corrected["rollout_kl:mean"] == pytest.approx(0.0, abs=1e-12)
    assert corrected["rollout_kl_k3:mean"] == pytest.approx((math.exp(0.5) + math.exp(-0.5) - 2) / number)
    assert not any(name.startswith("rollout") for name in uncorrected)


def test_models_of_one_session_do_not_touch_each_other(
    client: tinker.ServiceClient, new_client: Callable[[], tinker.ServiceClient]
) -> None:
    """The numbers of a run in company equal those of the same run alone, bit for bit."""
    solo = client.create_lora_training_client(base_model="toy", rank=4, seed=8).result(timeout=300)
    alone = [step(solo, ragged(2, seed)).metrics["loss:sum"] for seed in range(3)]
    company = new_client()
    models = [
        company.create_lora_training_client(base_model="toy", rank=rank, seed=seed).result(timeout=300)
        for rank, seed in ((4, 8), (8, 9), (2, 10))
    ]
    together: list[float] = []
    for seed in range(3):
        passes = [model.forward_backward(ragged(2, seed), "cross_entropy") for model in models]
        steps = [
            model.optim_step(tinker.AdamParams(learning_rate=rate, weight_decay=decay))
            for model, rate, decay in zip(models, (0.01, 1.0, 0.5), (0.0, 0.5, 0.1), strict=True)
        ]
        together.append(passes[0].result(timeout=300).metrics["loss:sum"])
        for each in (*passes, *steps):
            each.result(timeout=300)
    assert together == alone
