"""The official SDK and its command line, as users use them."""

from __future__ import annotations

import json
import pickle
import tempfile
from typing import Any, Final

import numpy as np
import tinker
from click.testing import CliRunner

from tinsmith_conformance.data import TOKENS, learned
from tinsmith_conformance.registry import Group
from tinsmith_conformance.tester import Tester
from tinsmith_conformance.verdicts import expect, skip

SDK: Final = Group("sdk", "The official SDK, as scripts use it.")
CLI: Final = Group("cli", "The official command line.")

_WAIT_S: Final = 50.0


def _now(made: Any) -> Any:
    """Up to 0.37 makers of clients return the client, later ones a future of it."""
    return made.result(_WAIT_S) if hasattr(made, "result") else made


def _client(t: Tester, **fields: Any) -> tinker.TrainingClient:
    made = t.sdk().create_lora_training_client(base_model=t.target.model, **{"rank": 8, "seed": 1, **fields})
    client: tinker.TrainingClient = _now(made)
    return client


def _datum(weights: list[float] | None = None) -> tinker.Datum:
    inputs: Any = {"target_tokens": list(TOKENS[1:]), "weights": weights or [1.0] * (len(TOKENS) - 1)}
    return tinker.Datum(model_input=tinker.ModelInput.from_ints(list(TOKENS[:-1])), loss_fn_inputs=inputs)


def _step(client: tinker.TrainingClient) -> Any:
    passed = client.forward_backward([_datum()], "cross_entropy")
    client.optim_step(tinker.AdamParams(learning_rate=0.01)).result(_WAIT_S)
    return passed.result(_WAIT_S)


def _logprobs(client: tinker.TrainingClient) -> Any:
    output = client.forward([_datum()], "cross_entropy").result(_WAIT_S)
    return np.asarray(output.loss_fn_outputs[0]["logprobs"].data, np.float64)


@SDK.check
def training(t: Tester) -> None:
    """A training client trains, and its loss falls.

    No script works.
    """
    client = _client(t)
    first = _step(client).metrics["loss:sum"]
    for _ in range(4):
        last = _step(client).metrics["loss:sum"]
    expect(last < first, f"it was {first}, and is {last}")


@SDK.check
def same_as_http(t: Tester) -> None:
    """The SDK trains the same model as plain HTTP, bit for bit.

    What is trained depends on the client.
    """
    client, model = _client(t), t.model()
    _step(client)
    model.step([learned()])
    expect(np.array_equal(_logprobs(client), model.logprobs()), "the weights differ")


@SDK.check
def custom_losses(t: Tester) -> None:
    """forward_backward_custom has the gradient of the loss that it computes.

    DPO and all losses of one's own train another model.
    """

    def twice(data: Any, outputs: Any) -> Any:
        del data
        loss = -2 * sum(each.sum() for each in outputs)
        return loss, {"mine:sum": float(loss.detach())}

    client, model = _client(t), t.model()
    try:
        seen = client.forward_backward_custom([_datum()], twice).result(_WAIT_S)
    except ImportError:
        skip("forward_backward_custom needs torch, which is not installed")
    client.optim_step(tinker.AdamParams(learning_rate=0.01)).result(_WAIT_S)
    model.step([learned(weights=2.0)])
    expect(abs(seen.metrics["mine:sum"] - seen.metrics["loss:sum"]) < 1e-3, f"the metrics are {seen.metrics}")
    off = np.abs(_logprobs(client) - model.logprobs()).max()
    expect(off < 1e-5, f"the logprobs differ by {off:.2g}")


@SDK.check
def resuming(t: Tester) -> None:
    """A training client is made from a saved state, and goes on as the first.

    No run can be resumed.
    """
    client = _client(t)
    _step(client)
    path = client.save_state("state").result(_WAIT_S).path
    resumed = _now(t.sdk().create_training_client_from_state_with_optimizer(path))
    for each in (client, resumed):
        _step(each)
    expect(np.array_equal(_logprobs(client), _logprobs(resumed)), "the weights differ")


@SDK.check
def fresh_optimizers(t: Tester) -> None:
    """A training client is made from a saved state without its optimizer.

    Fine-tuning from a checkpoint fails.
    """
    client = _client(t)
    path = client.save_state("state").result(_WAIT_S).path
    _step(_now(t.sdk().create_training_client_from_state(path)))


@SDK.check
def rollouts(t: Tester) -> None:
    """A sampling client of the current weights samples, with logprobs.

    No reinforcement learning works.
    """
    sampler = _now(_client(t).save_weights_and_get_sampling_client())
    params = tinker.SamplingParams(max_tokens=4, stop=[])
    drawn = sampler.sample(tinker.ModelInput.from_ints(list(TOKENS)), 3, params).result(_WAIT_S)
    expect(len(drawn.sequences) == 3, f"{len(drawn.sequences)} of 3 came")
    for each in drawn.sequences:
        expect(len(each.tokens) == len(each.logprobs or []), "tokens and logprobs are not equally many")


@SDK.check
def scoring(t: Tester) -> None:
    """compute_logprobs returns one entry for each token, and None for the first.

    KL penalties fail.
    """
    sampler = _now(t.sdk().create_sampling_client(base_model=t.target.model))
    scores = sampler.compute_logprobs(tinker.ModelInput.from_ints(list(TOKENS))).result(_WAIT_S)
    expect(len(scores) == len(TOKENS) and scores[0] is None, f"they are {scores}")


@SDK.check
def saved_samplers(t: Tester) -> None:
    """A sampling client is made from a path.

    Evaluations of saved checkpoints fail.
    """
    path = _client(t).save_weights_for_sampler("snapshot").result(_WAIT_S).path
    sampler = _now(t.sdk().create_sampling_client(model_path=path))
    params = tinker.SamplingParams(max_tokens=2)
    sampler.sample(tinker.ModelInput.from_ints(list(TOKENS)), 1, params).result(_WAIT_S)


@SDK.check
def pickled_samplers(t: Tester) -> None:
    """A sampling client can be pickled, and its copy samples.

    Rollouts in other processes fail.
    """
    sampler = _now(t.sdk().create_sampling_client(base_model=t.target.model))
    copy = pickle.loads(pickle.dumps(sampler))
    params = tinker.SamplingParams(max_tokens=2)
    copy.sample(tinker.ModelInput.from_ints(list(TOKENS)), 1, params).result(_WAIT_S)


@SDK.check
def typed_errors(t: Tester) -> None:
    """A bad datum raises RequestFailedError at once.

    The SDK repeats it for minutes, and then raises something without a type.
    """
    wrong = tinker.Datum(
        model_input=tinker.ModelInput.from_ints([1]),
        loss_fn_inputs={"target_tokens": [2**31 - 1], "weights": [1.0]},  # type: ignore[dict-item]
    )
    try:
        _client(t).forward_backward([wrong], "cross_entropy").result(_WAIT_S)
    except (tinker.RequestFailedError, tinker.BadRequestError):
        return
    expect(False, "it succeeded")  # noqa: FBT003 - a statement reads worse


@SDK.check
def closing(t: Tester) -> None:
    """A `with` block around a client ends without an error.

    Training succeeds, and then the script fails.
    """
    with tinker.ServiceClient(base_url=t.target.url, api_key=t.key) as service:
        _now(service.create_lora_training_client(base_model=t.target.model, rank=4))


@SDK.check
def capabilities(t: Tester) -> None:
    """The SDK reads the capabilities.

    Scripts that choose a model fail.
    """
    models = t.sdk().get_server_capabilities().supported_models
    expect(t.target.model in [each.model_name for each in models], "the model is missing")


@SDK.check
def split_by_the_sdk(t: Tester) -> None:
    """A batch of more data than the SDK sends at once has one result for each.

    Large batches hang or lose data.
    """
    config = t.ok("client/config", {"sdk_version": tinker.__version__})
    count = config.get("fwdbwd_max_chunk_len", 1024) + 3
    if count > 1100:
        skip(f"the server takes {count - 3} data at once")
    output = _client(t).forward([_datum()] * count, "cross_entropy").result(_WAIT_S)
    expect(len(output.loss_fn_outputs) == count, f"{len(output.loss_fn_outputs)} of {count} came")


def _run(t: Tester, *arguments: str) -> Any:
    from tinker.cli.__main__ import main_cli

    with tempfile.TemporaryDirectory() as home:
        environment = {"TINKER_BASE_URL": t.target.url, "TINKER_API_KEY": t.key, "HOME": home, "TINKER_TELEMETRY": "0"}
        result = CliRunner(env=environment).invoke(main_cli, ["-f", "json", *arguments])
    error = "" if result.exception is None else f"{type(result.exception).__name__}: {result.exception}"
    expect(result.exit_code == 0, f"exit code {result.exit_code}: {error} {result.output[-300:]}")
    start = result.output.find("{")
    return json.JSONDecoder().raw_decode(result.output[start:])[0] if start >= 0 else {}


@CLI.check
def model_list(t: Tester) -> None:
    """`tinker model list` shows the model under test.

    Users cannot see what they may train.
    """
    expect(t.target.model in json.dumps(_run(t, "model", "list")), "it does not")


@CLI.check
def auth_status(t: Tester) -> None:
    """`tinker auth status` succeeds.

    Users cannot see whether their key works.
    """
    _run(t, "auth", "status")


@CLI.check
def run_list(t: Tester) -> None:
    """`tinker run list` shows a new run.

    Users cannot find their runs.
    """
    model = t.model()
    expect(model.id in json.dumps(_run(t, "run", "list")), "it does not")


@CLI.check
def run_info(t: Tester) -> None:
    """`tinker run info` tells about a run.

    Users cannot see what a run was.
    """
    expect(t.target.model in json.dumps(_run(t, "run", "info", t.model().id)), "it does not name the base model")


@CLI.check
def checkpoint_list(t: Tester) -> None:
    """`tinker checkpoint list` shows the checkpoints of a run.

    Users cannot find their checkpoints.
    """
    model = t.model()
    path = model.save()
    expect(path in json.dumps(_run(t, "checkpoint", "list", "--run-id", model.id)), "it does not")


@CLI.check
def checkpoint_info(t: Tester) -> None:
    """`tinker checkpoint info` tells about a checkpoint.

    Users cannot see what a checkpoint is.
    """
    _run(t, "checkpoint", "info", t.model().save())


@CLI.check
def checkpoint_publish(t: Tester) -> None:
    """`tinker checkpoint publish` and `unpublish` succeed.

    Users cannot share a checkpoint, or take it back.
    """
    path = t.model().save()
    _run(t, "checkpoint", "publish", path)
    _run(t, "checkpoint", "unpublish", path)


@CLI.check
def checkpoint_ttl(t: Tester) -> None:
    """`tinker checkpoint set-ttl` sets and removes a time to live.

    Users cannot keep a checkpoint from expiring.
    """
    path = t.model().save()
    _run(t, "checkpoint", "set-ttl", path, "--ttl", "7200")
    _run(t, "checkpoint", "set-ttl", path, "--remove")


@CLI.check
def checkpoint_delete(t: Tester) -> None:
    """`tinker checkpoint delete` deletes a checkpoint.

    Users cannot free space.
    """
    model = t.model()
    path = model.save()
    _run(t, "checkpoint", "delete", path, "-y")
    expect(not t.get(f"training_runs/{model.id}/checkpoints")["checkpoints"], "it is still there")


@CLI.check
def checkpoint_download(t: Tester) -> None:
    """`tinker checkpoint download` downloads a training checkpoint.

    Nobody gets weights out of the server.
    """
    with tempfile.TemporaryDirectory() as directory:
        _run(t, "checkpoint", "download", t.model().save(), "--output", directory)
