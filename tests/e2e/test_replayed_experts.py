"""Routing replay with real trainers and samplers, through the SDK.

The model's router is undecided: rounding chooses the experts. So the trainer's own choice gives other logprobs, and a
test that agrees has replayed what was sampled.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import tinker
from few_programs import FEW_PROGRAMS, SHAPE
from jax_harness import compile_quickly
from processes import Event, Launcher, Served
from safetensors.numpy import load_file, save_file
from scenario import state_at
from tinker import types

from tinsmith import expert_metrics
from tinsmith.settings import ModelSettings
from tinsmith.testing.harness import RunningServer, running_server
from tinsmith.testing.sdk_data import logprobs, rl_datum
from tinsmith_checkpoints.huggingface.tiny_model import write_tiny_model

pytestmark = [
    pytest.mark.slow,
    pytest.mark.thorough,  # test_routing_replay.py has the toy backend, and tests of plugins what they compute
]

WAIT_S = 600  # the first operations compile
KEY = "tml-test"
METRIC = "routing_replayed:sum"
JAX: dict[str, Any] = {"plugin": "jax", "warm_up": False, **FEW_PROGRAMS}
JAX_SAMPLER = {name: value for name, value in JAX.items() if name != "max_batch_tokens"}
MESH = {"mesh": {"data": 2, "tensor": 2}, "nproc_per_node": 2, "simulated_devices": 2}
MEGATRON: dict[str, Any] = {
    "plugin": "megatron",
    "device": "cpu",
    "max_context_tokens": FEW_PROGRAMS["max_context_tokens"],
    "nproc_per_node": 2,
    "tensor_parallel": 2,
    "expert_parallel": 2,
    "isolation": "fast",
}
VLLM: dict[str, Any] = {"plugin": "vllm", "max_model_len": 128, "kv_cache_bytes": 1 << 26, "dtype": "float32"}
BFLOAT16 = {"backend": {**JAX, "dtype": "bfloat16"}, "sampler": {**VLLM, "dtype": "bfloat16"}}
PAIRS = [
    pytest.param(({"backend": JAX}, 1e-4), id="jax"),
    pytest.param(({"backend": {**JAX, **MESH}}, 1e-4), id="jax-mesh"),
    pytest.param(({"backend": JAX, "sampler": JAX_SAMPLER}, 1e-4), id="jax-and-jax"),
    pytest.param(({"backend": JAX, "sampler": VLLM}, 1e-3), id="jax-and-vllm"),
    pytest.param((BFLOAT16, 0.05), id="jax-and-vllm-bfloat16"),
    pytest.param(({"backend": MEGATRON, "sampler": JAX_SAMPLER}, 1e-4), id="megatron-jax"),
    pytest.param(({"backend": MEGATRON, "sampler": VLLM}, 1e-3), id="megatron-vllm"),
]


def write_undecided_model(directory: Path, *, dtype: str = "float32") -> None:
    """Write a random model with experts in groups of four, whose rows in the router differ by rounding alone."""
    tie = {"float32": 1e-7, "bfloat16": 1e-2}[dtype]
    write_tiny_model(directory, replace(SHAPE, family="qwen3_moe", num_experts=8, hidden_size=64, head_dim=32))
    rng = np.random.default_rng(0)
    for file in directory.glob("*.safetensors"):
        weights = load_file(file)
        for name in [name for name in weights if name.endswith(".mlp.gate.weight")]:
            first = weights[name][::4].repeat(4, axis=0)
            weights[name] = first * (1 + tie * rng.standard_normal(first.shape).astype(np.float32))
        save_file(weights, file, metadata={"format": "pt"})


def settings_of(path: Path, pair: dict[str, Any]) -> ModelSettings:
    """The server's own check of saves is off: it compares with the trainer's own experts."""
    own: dict[str, Any] = {"routing_replay": {"enabled": True}, "consistency": {"action": "off"}}
    return ModelSettings.model_validate({"name": "tiny", "path": path, **own, **pair})


def sampled(sampler: tinker.SamplingClient, prompt: Sequence[int], number: int = 2) -> list[types.SampledSequence]:
    params = types.SamplingParams(max_tokens=24, seed=len(prompt), stop=[])
    answer = sampler.sample(types.ModelInput.from_ints(list(prompt)), number, params).result(timeout=WAIT_S)
    return list(answer.sequences)


def datum_of(prompt: Sequence[int], sequence: types.SampledSequence, advantage: float = 1.0) -> tinker.Datum:
    own = list(sequence.logprobs or [])
    return rl_datum([*prompt, *sequence.tokens], [0.0] * (len(prompt) - 1) + own, advantage)


def cut(datum: tinker.Datum) -> tinker.Datum:
    """Leave out the last token, so that the sequence is not one that was sampled."""
    inputs = {name: each.data[:-1] for name, each in datum.loss_fn_inputs.items()}
    tokens = datum.model_input.to_ints()[:-1]
    return tinker.Datum(model_input=tinker.ModelInput.from_ints(tokens), loss_fn_inputs=inputs)


@pytest.fixture(params=PAIRS)
def served(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[RunningServer, float]]:
    pair, agree = request.param
    if "sampler" in pair and find_spec(f"tinsmith_{pair['sampler']['plugin']}") is None:
        pytest.skip("the sampler is not installed")
    compile_quickly(monkeypatch)
    write_undecided_model(tmp_path / "model", dtype=pair["backend"].get("dtype", "float32"))
    with running_server(tmp_path / "data", models=[settings_of(tmp_path / "model", pair)]) as server:
        yield server, agree


@pytest.fixture
def service(served: tuple[RunningServer, float]) -> Iterator[tinker.ServiceClient]:
    made = tinker.ServiceClient(base_url=served[0].url, api_key=KEY)
    yield made
    made.close("success").result(timeout=WAIT_S)


def test_what_was_sampled_is_trained_with_its_experts(
    served: tuple[RunningServer, float], service: tinker.ServiceClient
) -> None:
    """Groups of samples, prompts of several pages that begin alike, and again after a step."""
    server, agree = served
    model = service.create_lora_training_client(base_model="tiny", rank=4, seed=1).result(timeout=WAIT_S)
    start = np.random.default_rng(0).integers(3, SHAPE.vocab_size, 80).tolist()
    prompts = [start, start[:70], start[3:8]]
    for turn in range(2):
        sampler = model.save_weights_and_get_sampling_client().result(timeout=WAIT_S)
        drawn = [(prompt, each) for prompt in prompts for each in sampled(sampler, prompt)]
        data = [datum_of(prompt, each, advantage=(-1.0) ** n) for n, (prompt, each) in enumerate(drawn)]
        passed = model.forward_backward([*data, cut(data[0])], "importance_sampling").result(timeout=WAIT_S)
        model.optim_step(tinker.AdamParams(learning_rate=0.01)).result(timeout=WAIT_S)
        assert passed.metrics[METRIC] == len(data), turn
        assert passed.metrics.keys() >= expert_metrics(np.ones((1, 2), np.int64)).keys()
        *replayed, own = logprobs(passed)
        for (_, sequence), scored in zip(drawn, replayed, strict=True):
            np.testing.assert_allclose(scored[-len(sequence.tokens) :], sequence.logprobs, rtol=0, atol=agree)
        apart = np.subtract(own, replayed[0][:-1])
        assert np.abs(apart).max() > 0.01, "without replay, other experts compute the same tokens"
    assert counted(server) == {"replayed": 2 * len(data), "own_routing": 2}


def counted(server: RunningServer) -> dict[str, float]:
    lines = httpx.get(f"{server.url}/metrics", headers={"x-api-key": KEY}).text.splitlines()
    found = (line.rpartition(" ") for line in lines if line.startswith("tinsmith_routing_replay_sequences_total"))
    return {name.rpartition('outcome="')[2].removesuffix('"}'): float(number) for name, _, number in found}


KILLS = {"supervisor": {"restart_backoff_s": 0.05, "restart_backoff_max_s": 0.5}}
DEATHS = [
    "engine.run_batch.before=kill",  # of the pass
    "engine.run_batch.after=kill",
    "store.complete.before=kill",
    "store.complete.after=kill",
    "recovery.replay.before=kill@2",  # the pass again: it is the second operation that changes the model
    "recovery.replay.after=kill@2",
]
"""Where one engine after the other dies."""


class Deaths:
    """Arms one engine after the other, and counts those that died."""

    def __init__(self) -> None:
        self.to_come, self.number = [*DEATHS], 0
        self.served: Served | None = None

    def attach(self, served: Served) -> None:
        self.served = served

    def heard(self, event: Event) -> None:
        assert self.served is not None
        if event.role == "engine" and event.what == "born" and self.to_come:
            self.served.arm("engine", self.to_come.pop(0))  # the next one
        self.number += event.role == "engine" and event.killed


def scripted(
    service: tinker.ServiceClient, after_sampling: Callable[[], object] = lambda: None
) -> tuple[list[Any], str]:
    """Sample and train on it, twice; return all that the client saw, and where the end is saved."""
    model = service.create_lora_training_client(base_model="tiny", rank=4, seed=1).result(timeout=WAIT_S)
    start = np.random.default_rng(1).integers(3, SHAPE.vocab_size, 40).tolist()
    seen: list[Any] = []
    for turn in range(2):
        sampler = model.save_weights_and_get_sampling_client().result(timeout=WAIT_S)
        drawn = sampled(sampler, start)
        data = [datum_of(start, each, advantage=(-1.0) ** n) for n, each in enumerate(drawn)]
        if turn == 0:
            after_sampling()
        passed = model.forward_backward([*data, cut(data[0])], "importance_sampling").result(timeout=WAIT_S)
        assert passed.metrics[METRIC] == len(data)
        replayed, *_, own = logprobs(passed)
        assert np.abs(np.subtract(own, replayed[:-1])).max() > 0.01, "experts must make a difference"
        stepped = model.optim_step(tinker.AdamParams(learning_rate=0.01)).result(timeout=WAIT_S)
        seen += [[(each.tokens, each.logprobs) for each in drawn], logprobs(passed), passed.metrics, stepped.metrics]
    return seen, model.save_state("end").result(timeout=WAIT_S).path


def test_a_kill_changes_no_bits(launcher: Launcher, tmp_path: Path) -> None:
    """Engines die between sample and pass, in the pass, and when they compute it again; then a model is left alone."""
    write_undecided_model(tmp_path / "model")
    deaths, model = Deaths(), settings_of(tmp_path / "model", {"backend": JAX})
    served = Served(launcher, tmp_path / "run", [model], settings=KILLS, on_event=deaths.heard, prepare=deaths.attach)
    try:
        service = tinker.ServiceClient(base_url=served.url, api_key=KEY)
        seen, saved = scripted(service, lambda: served.kill("engine"))
        assert deaths.number == 1 + len(DEATHS)
        undisturbed, end = scripted(service)
        assert seen == undisturbed
        assert state_at(served.data_dir, saved) == state_at(served.data_dir, end)
        service.close("success").result(timeout=WAIT_S)
        assert served.stop() == 0
    finally:
        served.close()
