"""What a script does with the SDK, in calls that every release from 0.22.3 on has: `sdk_scenario.py URL`.

It runs by itself, with whichever SDK is on the path, and prints the numbers it saw as JSON. The numbers of two releases
must be equal. No module of ours is imported: the SDK is all that it needs.
"""

import json
import sys
import tarfile
import tempfile
import urllib.request
from pathlib import Path
from typing import Any

import tinker
from tinker import types

TOKENS = [3, 1, 4, 1, 5, 9, 2, 6]
WAIT_S = 300


def main(url: str) -> dict[str, Any]:
    service = tinker.ServiceClient(base_url=url, api_key="tml-scenario")
    assert [model.model_name for model in service.get_server_capabilities().supported_models] == ["toy"]
    training = now(service.create_lora_training_client(base_model="toy", rank=4, seed=7))
    seen: dict[str, Any] = {"sdk": tinker.__version__}
    seen["losses"] = [step(training, length) for length in (8, 5, 3)]
    seen["forward"] = logprobs(training.forward([datum(8), datum(4)], "cross_entropy").result(WAIT_S))
    seen["rl"] = reinforce(training, seen["forward"][0])
    seen["custom"] = custom_loss(training)
    refused(training)
    seen["resumed"] = resume(service, training)
    seen["sampled"] = sample(service, training)
    checkpoints(service, training)
    return {**seen, "run_id": training.get_info().model_id}


def now(client: Any) -> Any:
    """Up to 0.37 makers of clients return the client, later ones a future of it."""
    return client.result(WAIT_S) if hasattr(client, "result") else client


def datum(length: int, weights: list[float] | None = None) -> types.Datum:
    targets = [*TOKENS[1:length], 7]
    inputs = {"target_tokens": targets, "weights": weights or [1.0] * length}
    return types.Datum(model_input=types.ModelInput.from_ints(TOKENS[:length]), loss_fn_inputs=inputs)


def logprobs(output: types.ForwardBackwardOutput) -> list[list[float]]:
    return [list(each["logprobs"].data) for each in output.loss_fn_outputs]


def step(training: tinker.TrainingClient, length: int) -> float:
    passed = training.forward_backward([datum(length), datum(length - 1)], "cross_entropy")
    training.optim_step(types.AdamParams(learning_rate=0.05)).result(WAIT_S)
    return passed.result(WAIT_S).metrics["loss:sum"]


def reinforce(training: tinker.TrainingClient, scores: list[float]) -> float:
    inputs = {"target_tokens": [*TOKENS[1:], 7], "logprobs": scores, "advantages": [1.0] * len(TOKENS)}
    data = [types.Datum(model_input=types.ModelInput.from_ints(TOKENS), loss_fn_inputs=inputs)]
    return training.forward_backward(data, "ppo").result(WAIT_S).metrics["loss:sum"]


def custom_loss(training: tinker.TrainingClient) -> float:
    def loss(data: Any, outputs: Any) -> Any:
        del data
        total = -sum(each.sum() for each in outputs)
        return total, {"mine:sum": float(total.detach())}

    return training.forward_backward_custom([datum(6)], loss).result(WAIT_S).metrics["mine:sum"]


def refused(training: tinker.TrainingClient) -> None:
    """A pass, and then the step whose window holds it."""
    wrong = types.Datum(
        model_input=types.ModelInput.from_ints([1]), loss_fn_inputs={"target_tokens": [99999], "weights": [1.0]}
    )
    fails(training.forward_backward([wrong], "cross_entropy"), "99999")
    fails(training.optim_step(types.AdamParams()), "this step is discarded")


def fails(future: Any, words: str) -> None:
    message = "it succeeded"
    try:
        future.result(WAIT_S)
    except tinker.RequestFailedError as error:
        message = str(error)
    assert words in message, message


def resume(service: tinker.ServiceClient, training: tinker.TrainingClient) -> list[list[float]]:
    """Save, go on, and start again from the checkpoint, with and without the optimizer."""
    saved = training.save_state("state").result(WAIT_S).path
    after = []
    for client in (
        training,
        now(service.create_training_client_from_state_with_optimizer(saved)),
        now(service.create_training_client_from_state(saved)),
    ):
        client.forward_backward([datum(7)], "cross_entropy").result(WAIT_S)
        client.optim_step(types.AdamParams(learning_rate=0.05)).result(WAIT_S)
        after.append(logprobs(client.forward([datum(7)], "cross_entropy").result(WAIT_S))[0])
    training.load_state(saved).result(WAIT_S)
    assert after[0] != after[2], "the optimizer's moments made no difference"
    return after


def sample(service: tinker.ServiceClient, training: tinker.TrainingClient) -> list[Any]:
    path = training.save_weights_for_sampler("for-sampling").result(WAIT_S).path
    prompt = types.ModelInput.from_ints(TOKENS)
    params = types.SamplingParams(max_tokens=6, seed=11, temperature=0.7)
    seen: list[Any] = []
    for sampler in (
        now(service.create_sampling_client(base_model="toy")),
        now(service.create_sampling_client(model_path=path)),
        now(training.save_weights_and_get_sampling_client()),
    ):
        drawn = sampler.sample(prompt, num_samples=2, sampling_params=params).result(WAIT_S)
        seen.append([list(sequence.tokens) for sequence in drawn.sequences])
        scores = sampler.compute_logprobs(prompt).result(WAIT_S)
        assert scores[0] is None
        seen.append(scores[1:])
    assert seen[3] == seen[5], "two snapshots of one state differ"
    assert seen[1] != seen[3], "training changed nothing"
    return seen


def checkpoints(service: tinker.ServiceClient, training: tinker.TrainingClient) -> None:
    rest = service.create_rest_client()
    run_id = training.get_info().model_id
    listed = {each.checkpoint_id: each for each in rest.list_checkpoints(run_id).result(WAIT_S).checkpoints}
    assert {"weights/state", "sampler_weights/for-sampling"} <= set(listed)
    if hasattr(rest, "get_checkpoint_archive_url"):  # up to 0.35
        downloaded(rest.get_checkpoint_archive_url(run_id, "sampler_weights/for-sampling").result(WAIT_S).url)
    path = listed["weights/state"].tinker_path
    rest.publish_checkpoint_from_tinker_path(path).result(WAIT_S)
    rest.unpublish_checkpoint_from_tinker_path(path).result(WAIT_S)
    rest.delete_checkpoint_from_tinker_path(path).result(WAIT_S)
    left = {each.checkpoint_id for each in rest.list_checkpoints(run_id).result(WAIT_S).checkpoints}
    assert "weights/state" not in left


def downloaded(url: str) -> None:
    with tempfile.TemporaryDirectory() as directory:
        archive = Path(directory) / "archive.tar"
        with urllib.request.urlopen(url, timeout=WAIT_S) as response:  # without a key, as the SDK does
            archive.write_bytes(response.read())
            assert int(response.headers["Content-Length"]) == archive.stat().st_size
        with tarfile.open(archive) as tar:
            names = set(tar.getnames())
            assert {"adapter_config.json", "adapter_model.safetensors", "checkpoint_complete"} <= names, names
            config = tar.extractfile("adapter_config.json")
            assert config is not None
            assert json.load(config)["r"] == 4


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1])))
