"""Scripts through the unmodified SDK: `tinsmith serve` with Megatron ranks as trainer, JAX or vLLM as sampler."""

import json
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tinker
from typer.testing import CliRunner

from tinsmith.commands.cli import build_group
from tinsmith.plugins.loading import Plugins
from tinsmith.testing import TinyShape, write_tiny_model
from tinsmith.testing.sdk_data import datum, logprobs, step
from tinsmith.testing.served_process import ServedProcess, served_process, without_settings

pytestmark = [
    pytest.mark.slow,
    pytest.mark.thorough,
    pytest.mark.timeout(1800),
    pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning"),  # connections that the SDK leaves to the collector
]

EXAMPLES = Path(__file__).parents[3] / "examples"
LIMIT_S = 1500
WAIT_S = 600  # the first requests wait until the ranks have started
CONTEXT = 256
ALTERNATIVES = 8
AGREE = {"jax": 1e-4, "vllm": 1e-3}  # what is promised of a sampler beside a trainer in float32
SAMPLERS: Mapping[str, Mapping[str, object]] = {
    "jax": {"max_context_tokens": CONTEXT, "warm_up": False},
    "vllm": {"max_model_len": CONTEXT, "max_num_seqs": 64, "kv_cache_bytes": 32 << 20, "max_lora_rank": 32},
}


@dataclass(frozen=True, slots=True)
class Case:
    layout: Mapping[str, object]
    family: str = "qwen3"
    sampler: str = "jax"


CASES = {
    "experts": Case({"tensor_parallel": 2, "expert_parallel": 2, "isolation": "fast"}, family="qwen3_moe"),
    "experts and vllm": Case(
        {"tensor_parallel": 2, "expert_parallel": 2, "isolation": "fast"}, family="qwen3_moe", sampler="vllm"
    ),
    "dense": Case({"tensor_parallel": 2}),
    "dense and vllm": Case({"tensor_parallel": 2}, sampler="vllm"),
}
"""Packed with experts, as on GPUs; strict otherwise, as on CPUs."""


@dataclass(frozen=True, slots=True)
class Served:
    server: ServedProcess
    case: Case


@pytest.fixture(scope="module", params=CASES.values(), ids=CASES)
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    case: Case = request.param
    if find_spec(case.sampler) is None:
        pytest.skip(f"{case.sampler} is not installed")
    root = tmp_path_factory.mktemp("served")
    with served_process(root, settings(root, case)) as server:
        yield Served(server, case)


def settings(root: Path, case: Case) -> dict[str, Any]:
    write_tiny_model(root / "model", TinyShape(family=case.family, num_layers=2))  # type: ignore[arg-type]  # checked
    backend = {"plugin": "megatron", "device": "cpu", "nproc_per_node": 2, "max_context_tokens": CONTEXT}
    model = {
        "name": "tiny",
        "path": str(root / "model"),
        "backend": {**backend, **case.layout},
        "sampler": {"plugin": case.sampler, **SAMPLERS[case.sampler]},
    }
    return {"models": [model]}


@pytest.fixture
def client(served: Served) -> Iterator[tinker.ServiceClient]:
    made = tinker.ServiceClient(base_url=served.server.url, api_key="tml-megatron")
    yield made
    made.close("success").result(timeout=WAIT_S)


def test_what_was_trained_is_what_is_sampled(served: Served, client: tinker.ServiceClient) -> None:
    """What was sampled, and whole texts, as the trainer scores them; and the server's own check of the save."""
    model = client.create_lora_training_client(base_model="tiny", rank=4, seed=1).result(timeout=WAIT_S)
    text = np.random.default_rng(0).integers(5, 500, 90).tolist()
    data = [datum(text[:41]), datum(text)]
    losses = [step(model, data, learning_rate=5e-3).metrics["loss:sum"] for _ in range(10)]
    assert losses[-1] < 0.9 * losses[0]
    path = model.save_weights_for_sampler("kept").result(timeout=WAIT_S).path
    sampler = client.create_sampling_client(model_path=path).result(timeout=WAIT_S)
    prompt, params = text[:20], tinker.SamplingParams(max_tokens=16, seed=3, stop=[])
    drawn = sampler.sample(tinker.ModelInput.from_ints(prompt), 2, params).result(timeout=WAIT_S).sequences
    assert [len(each.tokens) for each in drawn] == [16, 16]
    base = client.create_sampling_client(base_model="tiny").result(timeout=WAIT_S)
    agree = AGREE[served.case.sampler]
    for each in drawn:
        whole = [*prompt, *each.tokens]
        trained = logprobs(model.forward([datum(whole)], "cross_entropy").result(timeout=WAIT_S))[0]
        np.testing.assert_allclose(each.logprobs, trained[-16:], rtol=0, atol=agree)
        own, without = (one.compute_logprobs(tinker.ModelInput.from_ints(whole)) for one in (sampler, base))
        np.testing.assert_allclose(own.result(timeout=WAIT_S)[1:], trained, rtol=0, atol=agree)
        assert np.abs(np.subtract(without.result(timeout=WAIT_S)[1:], trained)).max() > 0.1
    (save,) = (each for each in report_of(served, model) if "max_difference" in each["metrics"])
    assert save["notes"][-1] == "consistent"
    assert save["metrics"]["max_difference"] < agree


def test_a_student_learns_what_its_teacher_thinks(served: Served, client: tinker.ServiceClient) -> None:
    """A distillation: targets are the teacher's best tokens at each sampled position, weights their probabilities."""
    teacher, student = (
        client.create_lora_training_client(base_model="tiny", rank=4, seed=seed).result(timeout=WAIT_S)
        for seed in (1, 2)
    )
    text = np.random.default_rng(0).integers(5, 500, 90).tolist()
    for _ in range(5):
        step(teacher, [datum(text)], learning_rate=5e-3)
    path = teacher.save_weights_for_sampler("teacher").result(timeout=WAIT_S).path
    sampler = client.create_sampling_client(model_path=path).result(timeout=WAIT_S)
    prompt, params = text[:20], tinker.SamplingParams(max_tokens=16, seed=3, stop=[])
    answer = sampler.sample(tinker.ModelInput.from_ints(prompt), 1, params, topk_sample_logprobs=ALTERNATIVES)
    (drawn,) = answer.result(timeout=WAIT_S).sequences
    thoughts = drawn.topk_logprobs_np
    assert thoughts is not None
    tokens = [*prompt, *drawn.tokens]
    targets_TK = np.zeros((len(tokens) - 1, ALTERNATIVES), np.int64)
    weights_TK = np.zeros(targets_TK.shape, np.float32)
    targets_TK[-16:], weights_TK[-16:] = thoughts.token_ids, np.exp(thoughts.logprobs)
    inputs = {"target_tokens": tinker.TensorData.from_numpy(targets_TK)}
    inputs["weights"] = tinker.TensorData.from_numpy(weights_TK)
    data = [tinker.Datum(model_input=tinker.ModelInput.from_ints(tokens[:-1]), loss_fn_inputs=inputs)]

    own = teacher.forward(data, "cross_entropy").result(timeout=WAIT_S)
    found = own.loss_fn_outputs[0]["logprobs"].to_numpy()
    np.testing.assert_allclose(found[-16:], thoughts.logprobs, rtol=0, atol=AGREE[served.case.sampler])
    losses = [step(student, data, learning_rate=5e-3).metrics["loss:sum"] for _ in range(10)]
    goal = own.metrics["loss:sum"]
    assert losses[-1] - goal < 0.5 * (losses[0] - goal)


def report_of(served: Served, model: tinker.TrainingClient) -> list[dict[str, Any]]:
    """Return the operations that `tinsmith runs show` prints, with the findings of the consistency gate."""
    plugins = Plugins.load()
    command = ["runs", "show", model.get_info().model_id, "--json", "--data-dir", str(served.server.data_dir)]
    done = CliRunner().invoke(build_group(plugins), command, obj=plugins, catch_exceptions=False)
    assert done.exit_code == 0, done.output
    operations: list[dict[str, Any]] = json.loads(done.stdout)["operations"]
    return operations


@pytest.mark.parametrize("script", ["pig_latin.py", "rl_group.py"])
def test_a_script_learns(served: Served, script: str) -> None:
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / script), "--base-url", served.server.url, "--base-model", "tiny"],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        env=without_settings(),
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr + served.server.log.read_text()
