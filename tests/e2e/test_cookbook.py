"""The scripts of docs/how-to/use-the-cookbook.md, where tinker-cookbook is installed, here or in an environment beside.

TINSMITH_COOKBOOK_PYTHON=cookbook/bin/python pytest tests/e2e/test_cookbook.py
"""

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, Literal

import httpx
import numpy as np
import pytest
import tinker
from megatron_harness import forking

from tinsmith import Array, LoraConfig, ModelState
from tinsmith.plugins.loading import Plugins
from tinsmith.settings import ModelSettings
from tinsmith.testing.harness import RunningServer, running_server
from tinsmith.testing.sdk_data import datum, step
from tinsmith_checkpoints.format import write_adapter
from tinsmith_checkpoints.huggingface.adapter_shapes import adapted_modules
from tinsmith_checkpoints.huggingface.safetensors_files import StoredTensors
from tinsmith_checkpoints.huggingface.tiny_model import TinyShape, write_tiny_model
from tinsmith_checkpoints.tools import rewriting
from tinsmith_checkpoints.tools.contents import open_contents

PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "use-the-cookbook.md"
PYTHON = os.environ.get("TINSMITH_COOKBOOK_PYTHON", sys.executable)
JAX = {"plugin": "jax", "max_lora_rank": 8, "warm_up": False}
MEGATRON = {"plugin": "megatron", "device": "cpu", "tensor_parallel": 2, "isolation": "fast", "max_lora_rank": 8}
VLLM = {"plugin": "vllm", "max_model_len": 512, "max_num_seqs": 64, "kv_cache_bytes": 32 << 20, "max_lora_rank": 8}
DENSE, EXPERTS = TinyShape(num_layers=2), TinyShape(num_layers=2, family="qwen3_moe")
CASES: dict[str, tuple[TinyShape, dict[str, dict[str, Any]]]] = {
    "jax": (DENSE, {"backend": JAX}),
    "experts on jax": (EXPERTS, {"backend": JAX}),
    "megatron": (DENSE, {"backend": MEGATRON, "sampler": JAX}),
    "experts on megatron": (EXPERTS, {"backend": {**MEGATRON, "expert_parallel": 2}, "sampler": JAX}),
    "megatron and vllm": (DENSE, {"backend": MEGATRON, "sampler": VLLM}),
    "experts on megatron and vllm": (EXPERTS, {"backend": {**MEGATRON, "expert_parallel": 2}, "sampler": VLLM}),
}
MESHES = {
    "2 processes": {"mesh": {"fsdp": 2, "tensor": 2}, "nproc_per_node": 2, "simulated_devices": 2},
    "4 processes": {"mesh": {"fsdp": 2, "tensor": 2}, "nproc_per_node": 4, "simulated_devices": 1},
}
SIDES: Final[tuple[Literal["A", "B"], ...]] = ("A", "B")
LIMIT_S = 600


def installed(module: str = "tinker_cookbook.rl.train") -> bool:
    looked = subprocess.run([PYTHON, "-c", f"import {module}"], capture_output=True, check=False)
    return looked.returncode == 0


pytestmark = pytest.mark.slow


@contextmanager
def serving(directory: Path, shape: TinyShape, sections: dict[str, dict[str, Any]]) -> Iterator[RunningServer]:
    if not installed():
        pytest.skip(f"tinker-cookbook is not installed for {PYTHON}; {PAGE.name} says how")
    plugins = Plugins.load()
    installed_here = plugins.backends.unambiguous().keys() | plugins.samplers.unambiguous().keys()
    if missing := {section["plugin"] for section in sections.values()} - installed_here:
        pytest.skip(f"tinsmith-{' and tinsmith-'.join(missing)} is not installed")
    model = directory / "model"
    write_tiny_model(model, shape)
    settings = ModelSettings.model_validate({"name": str(model), "path": model, **sections})
    ranks = forking() if settings.backend.plugin == "megatron" else nullcontext()
    losses = {"stable_reinforce": "ppo"}
    with ranks, running_server(directory / "data", models=[settings], losses=losses) as running:
        yield running


@pytest.fixture(
    scope="module",
    params=[pytest.param(case, marks=[pytest.mark.thorough] if number else []) for number, case in enumerate(CASES)],
)
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    with serving(tmp_path_factory.mktemp("cookbook"), *CASES[request.param]) as running:
        yield running


def run(
    name: str, server: RunningServer, directory: Path, changed: Mapping[str, str] = MappingProxyType({})
) -> list[dict[str, Any]]:
    """Run a script of the page with some lines changed; return the metrics that it logged."""
    found = re.search(rf"<!-- file: {name}\.py -->\n```python\n(.*?)^```$", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    assert found is not None
    script, text = directory / f"{name}.py", found.group(1)
    for before, after in changed.items():
        assert text.count(before) == 1
        text = text.replace(before, after)
    script.write_text(text)
    command = [PYTHON, str(script), server.url, server.settings.models[0].name, str(directory)]
    environment = {**os.environ, "TINKER_API_KEY": "tml-cookbook", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return [json.loads(line) for line in (directory / name / "metrics.jsonl").read_text().splitlines()]


def test_supervised_training_evaluates_saves_and_resumes(server: RunningServer, tmp_path: Path) -> None:
    check_supervised_training(server, tmp_path)


@pytest.mark.thorough
@pytest.mark.parametrize("mesh", MESHES.values(), ids=MESHES)
def test_supervised_training_on_a_mesh(mesh: dict[str, object], tmp_path: Path) -> None:
    with serving(tmp_path, DENSE, {"backend": {**JAX, **mesh}}) as server:
        check_supervised_training(server, tmp_path)


def check_supervised_training(server: RunningServer, tmp_path: Path) -> None:
    metrics = run("sft", server, tmp_path)
    losses = [each["train_mean_nll"] for each in metrics if "train_mean_nll" in each]
    assert len(losses) == 6
    assert losses[-1] < losses[0]
    assert sum("test/nll" in each for each in metrics) == 3
    records = tmp_path / "sft" / "checkpoints.jsonl"
    saved = [json.loads(line) for line in records.read_text().splitlines()]
    assert [each["name"] for each in saved if "rolling" not in each] == ["000003", "final"]
    early = [each for each in saved if each["name"] <= "000003"]
    records.write_text("".join(json.dumps(each) + "\n" for each in early))  # as if it had been killed then
    assert [each["step"] for each in run("sft", server, tmp_path) if "train_mean_nll" in each] == list(range(6))
    resumed = [json.loads(line) for line in records.read_text().splitlines()][len(early) :]
    assert [each["batch"] for each in resumed] == [3, 4, 5, 0]  # 0: the next epoch's first
    assert saved[0]["state_path"].split("/")[2] not in {each["state_path"].split("/")[2] for each in resumed}


def test_reinforcement_learning_stays_on_policy(server: RunningServer, tmp_path: Path) -> None:
    metrics = run("rl", server, tmp_path)
    distances = [each["optim/kl_sample_train_v1"] for each in metrics if "optim/kl_sample_train_v1" in each]
    assert len(distances) == 4
    assert all(abs(distance) < 1e-6 for distance in distances)


@pytest.mark.parametrize(
    "line",
    [
        'loss_fn="stable_reinforce",',
        pytest.param(
            "async_config=train.AsyncConfig(max_steps_off_policy=1, groups_per_batch=4),", marks=pytest.mark.thorough
        ),
    ],
    ids=["synchronous", "asynchronous"],
)
def test_runs_with_the_default_loss_of_the_recipes(server: RunningServer, tmp_path: Path, line: str) -> None:
    """For `stable_reinforce`, another loss stands in."""
    metrics = run("rl", server, tmp_path, {'loss_fn="importance_sampling",  # or ppo, cispo': line})
    assert sum("optim/lr" in each for each in metrics) == 4


DOWNLOAD = """
import sys
from tinker_cookbook.weights import download
print(download(tinker_path=sys.argv[1], output_dir=sys.argv[2], base_url=sys.argv[3]))
"""


def test_the_cookbook_downloads_what_it_has_encrypted_for_itself(
    toy_server: RunningServer, client: tinker.ServiceClient, rest: tinker.RestClient, api_key: str, tmp_path: Path
) -> None:
    """It makes a key pair, asks for an export for its public key, and decrypts the files."""
    if not installed("tinker_cookbook.weights"):
        pytest.skip(f"tinker-cookbook is not installed for {PYTHON}; {PAGE.name} says how")
    model = client.create_lora_training_client(base_model="toy", rank=4, seed=1).result(timeout=LIMIT_S)
    step(model, [datum()])
    path = model.save_state("a").result(timeout=LIMIT_S).path
    plain = model.save_weights_external("plain").result(timeout=LIMIT_S).path
    command = [PYTHON, "-c", DOWNLOAD, path, str(tmp_path / "out"), toy_server.url]
    environment = {**os.environ, "TINKER_API_KEY": api_key, "TINKER_BASE_URL": toy_server.url}
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=False, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    urls = rest.get_external_weights_urls(plain).result(timeout=LIMIT_S).urls
    for name, url in urls.items():
        assert next((tmp_path / "out").rglob(name)).read_bytes() == httpx.get(url, timeout=LIMIT_S).content


MERGE = """
import sys
from tinker_cookbook.weights import build_hf_model
base, adapter, output = sys.argv[1:]
build_hf_model(base_model=base, adapter_path=adapter, output_path=output, merge_strategy="shard")
"""


@pytest.mark.parametrize("tied", [False, True])
def test_the_cookbook_merges_what_is_exported_for_it(tied: bool, tmp_path: Path) -> None:
    """Into the embedding, if that is the head: the cookbook does not part them, as `tinsmith checkpoint merge` does."""
    write_tiny_model(tmp_path / "base", TinyShape(num_layers=1, tied=tied))
    head = StoredTensors.of(tmp_path / "base", "model")["model.embed_tokens.weight" if tied else "lm_head.weight"]
    lora = LoraConfig(rank=4, seed=0, train_attn=False, train_mlp=False)
    weights = random_weights(tmp_path / "base", lora, re.compile(r"lm_head"))
    a, b = (weights[f"base_model.model.lm_head.lora_{side}.weight"] for side in "AB")
    merged = merged_by_the_cookbook(tmp_path, ModelState(lora=lora, weights=weights))
    np.testing.assert_allclose(
        merged["model.embed_tokens.weight" if tied else "lm_head.weight"], head + lora.scale * b @ a, rtol=0, atol=1e-5
    )


def test_the_cookbook_merges_experts_as_tinsmith_does(tmp_path: Path) -> None:
    """Adapters of attention, experts and head, from Tinker's layout: every weight of the base model."""
    write_tiny_model(tmp_path / "base", TinyShape(family="qwen3_moe", num_layers=2, num_experts=4, tied=False))
    lora = LoraConfig(rank=4, seed=0)
    weights = random_weights(tmp_path / "base", lora, re.compile(r".*\.(self_attn\.\w_proj|experts\.w[123])|lm_head"))
    theirs = merged_by_the_cookbook(tmp_path, ModelState(lora=lora, weights=weights))
    changed = rewriting.merge(
        open_contents(tmp_path / "adapter"),
        tmp_path / "base",
        tmp_path / "ours",
        dtype=None,
        shard_bytes=1 << 30,
        force=False,
        progress=lambda _: None,
    )
    assert len(changed) == 2 * (4 + 3 * 4) + 1
    ours = StoredTensors.of(tmp_path / "ours", "model")
    assert set(theirs) == set(ours)
    for name, array in ours.items():
        np.testing.assert_allclose(theirs[name], array, rtol=0, atol=1e-5, err_msg=name)


def random_weights(base: Path, lora: LoraConfig, chosen: re.Pattern[str]) -> dict[str, Array]:
    rng = np.random.default_rng(0)
    modules = adapted_modules(StoredTensors.of(base, "model").shapes())
    return {
        f"base_model.model.{name}.lora_{side}.weight": (0.1 * rng.normal(size=module.shape(side, lora.rank))).astype(
            "f"
        )
        for name, module in modules.items()
        if chosen.fullmatch(name)
        for side in SIDES
    }


def merged_by_the_cookbook(directory: Path, state: ModelState) -> StoredTensors:
    """Export an adapter to the base model in this directory, and have the cookbook merge the two."""
    if not installed("tinker_cookbook.weights"):
        pytest.skip(f"tinker-cookbook is not installed for {PYTHON}; {PAGE.name} says how")
    (directory / "adapter").mkdir()
    write_adapter(directory / "adapter", state, base_model="base")
    rewriting.export_peft(
        open_contents(directory / "adapter"),
        directory / "exported",
        base_model=None,
        force=False,
        progress=lambda _: None,
        head="unembed_tokens",
    )
    command = [PYTHON, "-c", MERGE, *(str(directory / name) for name in ("base", "exported", "merged"))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return StoredTensors.of(directory / "merged", "model")
