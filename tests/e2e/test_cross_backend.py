"""What one backend saved, another takes up: some steps here, some there, some here again, through the SDK.

Runs over the trainers that are installed. A server of its own per leg: nothing but the data directory goes from one
backend to the next.
"""

import itertools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import tinker
from few_programs import FEW_PROGRAMS, SHAPE
from fsdp_harness import forking as forking_fsdp
from megatron_harness import forking as forking_megatron

from tinsmith.plugins.loading import Plugins
from tinsmith.settings import ModelSettings, PluginSection
from tinsmith.testing.harness import running_server
from tinsmith.testing.sdk_data import ragged
from tinsmith_checkpoints.huggingface import tiny_causal_lm
from tinsmith_checkpoints.huggingface.tiny_model import write_tiny_model

WAIT_S = 600
ADAM = tinker.AdamParams(learning_rate=1e-3)
OPTIONS: dict[str, dict[str, object]] = {"jax": {"warm_up": False, **FEW_PROGRAMS}, "fsdp": {}, "toy": {}}
OPTIONS["megatron"] = {"device": "cpu", "tensor_parallel": 2, "max_context_tokens": 128, "max_lora_rank": 8}
MESHES = {  # of the jax backend, in as many processes
    "mesh of 2": {"mesh": {"tensor": 2}, "nproc_per_node": 2},
    "mesh of 4": {"mesh": {"fsdp": 2, "tensor": 2}, "nproc_per_node": 4},
}
EXPERTS = {  # of the megatron backend, in two processes
    "experts divided": {"tensor_parallel": 1, "expert_parallel": 2},
    "matrices and experts divided": {"expert_parallel": 2},
}
OPTIONS |= {name: {**OPTIONS["megatron"], "plugin": "megatron", **layout} for name, layout in EXPERTS.items()}
OPTIONS["stages"] = {**OPTIONS["megatron"], "plugin": "megatron", "tensor_parallel": 1, "pipeline_parallel": 2}
OPTIONS |= {name: {**OPTIONS["jax"], "plugin": "jax", "simulated_devices": 1, **mesh} for name, mesh in MESHES.items()}
INSTALLED = sorted(OPTIONS.keys() & Plugins.load().backends.unambiguous().keys())
REAL = [name for name in INSTALLED if name != "toy"]  # they train the same model
STEPS = [4, pytest.param(20, marks=pytest.mark.thorough)]  # of each leg
LEARNT = {4: 0.05, 20: 1.0}  # by the end of three legs; measured: 0.082 and 1.501 of the first loss, 5.720
SAME = [  # a run that resumes on the same server is in test_sdk_jax.py
    ("toy", 4),
    pytest.param("toy", 0, marks=pytest.mark.thorough),
    *(pytest.param(name, 4, marks=pytest.mark.thorough) for name in REAL if name != "fsdp"),
]
PAIRS = [  # the way there and the way back are in either one
    pytest.param(*pair, marks=[pytest.mark.thorough] if number else [])
    for number, pair in enumerate(itertools.permutations(REAL, 2))
]
FORKING: dict[str, Callable[[], AbstractContextManager[None]]] = {"fsdp": forking_fsdp, "megatron": forking_megatron}

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("cross") / "a" / "tiny"
    write_tiny_model(directory, SHAPE)
    return directory


@pytest.fixture(scope="module")
def model_of_experts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("cross") / "a" / "experts"
    write_tiny_model(directory, replace(SHAPE, family="qwen3_moe", intermediate_size=24, num_experts=4))
    return directory


def write_class(directory: Path, name: str) -> Path:
    tiny_causal_lm(name, {"vocab_size": SHAPE.vocab_size}).save_pretrained(directory)
    return directory


@contextmanager
def served(data_dir: Path, backend: str, model_path: Path) -> Iterator[tinker.ServiceClient]:
    section = PluginSection.model_validate({"plugin": backend, **OPTIONS[backend]})
    path = None if backend == "toy" else model_path
    model = ModelSettings(name=str(model_path), path=path, backend=section)
    with FORKING.get(section.plugin, nullcontext)(), running_server(data_dir, models=[model]) as server:
        client = tinker.ServiceClient(base_url=server.url, api_key="tml-cross")
        yield client
        client.close("success").result(timeout=300)


def fresh(client: tinker.ServiceClient, model_path: Path, rank: int) -> tinker.TrainingClient:
    return client.create_lora_training_client(base_model=str(model_path), rank=rank, seed=5).result(timeout=WAIT_S)


def resumed(client: tinker.ServiceClient, path: str) -> tinker.TrainingClient:
    return client.create_training_client_from_state_with_optimizer(path).result(timeout=WAIT_S)


def train(model: tinker.TrainingClient, steps: range) -> list[float]:
    """Return the mean loss per token of each step."""
    losses = []
    for seed in steps:
        data = ragged(3, seed)
        passed = model.forward_backward(data, "cross_entropy")
        stepped = model.optim_step(ADAM)
        total = passed.result(timeout=WAIT_S).metrics["loss:sum"]
        stepped.result(timeout=WAIT_S)
        losses.append(total / sum(each.model_input.length for each in data))
    return losses


def legs(
    data_dir: Path, backends: list[str], model_path: Path, rank: int, num_steps: int
) -> tuple[list[float], list[float]]:
    """Train `num_steps` on each in turn, and one step more on the last; return the losses of all legs.

    On the last server, another model is trained from the start without moving: return its losses, too.
    """
    path, moved = None, list[float]()
    for number, backend in enumerate(backends):
        last = number == len(backends) - 1
        steps = range(number * num_steps, (number + 1) * num_steps + last)
        with served(data_dir, backend, model_path) as client:
            model = fresh(client, model_path, rank) if path is None else resumed(client, path)
            moved += train(model, steps)
            path = model.save_state(f"leg-{number}").result(timeout=WAIT_S).path
            stayed = train(fresh(client, model_path, rank), range(len(backends) * num_steps + 1)) if last else []
    return moved, stayed


@pytest.mark.parametrize("num_steps", STEPS)
@pytest.mark.parametrize(("backend", "rank"), SAME)
def test_the_same_backend_resumes_bit_for_bit(
    tmp_path: Path, model_path: Path, backend: str, rank: int, num_steps: int
) -> None:
    moved, stayed = legs(tmp_path, [backend, backend], model_path, rank, num_steps)
    assert moved == stayed


@pytest.mark.skipif(len(REAL) < 2, reason=f"needs two trainers of Hugging Face models, installed are {REAL}")
@pytest.mark.parametrize("num_steps", STEPS)
@pytest.mark.parametrize(("home", "away"), PAIRS)
def test_another_backend_goes_on_where_the_first_one_was(
    tmp_path: Path, model_path: Path, home: str, away: str, num_steps: int
) -> None:
    """Every loss after each move, the very next one above all, is that of never having moved."""
    moved, stayed = legs(tmp_path, [home, away, home], model_path, 4, num_steps)
    np.testing.assert_allclose(moved, stayed, rtol=0, atol=1e-4)
    assert stayed[0] - stayed[-1] > LEARNT[num_steps], "it must have learnt something"


@pytest.mark.thorough
@pytest.mark.skipif(len(REAL) < 2, reason=f"needs two trainers of Hugging Face models, installed are {REAL}")
@pytest.mark.parametrize(("home", "away"), [("fsdp", "mesh of 2"), ("mesh of 4", "fsdp"), ("mesh of 2", "mesh of 4")])
def test_a_mesh_goes_on_where_another_backend_was(tmp_path: Path, model_path: Path, home: str, away: str) -> None:
    """The first loss there is one pass away from what was saved; the next ones follow steps of Adam."""
    moved, stayed = legs(tmp_path, [home, away, home], model_path, 4, 4)
    assert moved[:4] == stayed[:4]
    np.testing.assert_allclose(moved[4], stayed[4], rtol=0, atol=1e-5)
    np.testing.assert_allclose(moved, stayed, rtol=0, atol=1e-4)
    assert stayed[0] - stayed[-1] > LEARNT[4], "it must have learnt something"


@pytest.mark.thorough
@pytest.mark.parametrize("mesh", MESHES)
def test_the_same_mesh_resumes_bit_for_bit(tmp_path: Path, model_path: Path, mesh: str) -> None:
    moved, stayed = legs(tmp_path, [mesh, mesh], model_path, 4, 4)
    assert moved == stayed


@pytest.mark.thorough
@pytest.mark.skipif("megatron" not in REAL or "jax" not in REAL, reason=f"needs jax and megatron, installed are {REAL}")
@pytest.mark.parametrize("away", EXPERTS)
def test_experts_go_on_where_another_backend_was(tmp_path: Path, model_of_experts: Path, away: str) -> None:
    """Twenty steps on JAX, on Megatron, on JAX again; each hands over the adapters of attention, experts and head."""
    moved, stayed = legs(tmp_path, ["jax", away, "jax"], model_of_experts, 4, 20)
    np.testing.assert_allclose(moved, stayed, rtol=0, atol=1e-4)
    assert stayed[0] - stayed[-1] > LEARNT[20], "it must have learnt something"


@pytest.mark.thorough
@pytest.mark.skipif(len(REAL) < 3, reason=f"needs jax, fsdp and megatron, installed are {REAL}")
@pytest.mark.parametrize(
    ("name", "away"),
    [
        ("Qwen3_5ForCausalLM", ["stages", "fsdp"]),
        ("Qwen3_5MoeForConditionalGeneration", ["stages", "fsdp"]),
        ("Qwen3NextForCausalLM", ["stages", "fsdp"]),
        ("DeepseekV3ForCausalLM", ["megatron", "fsdp"]),
    ],
)
def test_other_layers_go_on_where_another_backend_was(tmp_path: Path, name: str, away: list[str]) -> None:
    """Twenty steps on each; each hands over the adapters of all kinds of layers, and the moments."""
    model = write_class(tmp_path / "a" / "model", name)
    moved, stayed = legs(tmp_path, ["jax", *away, "jax"], model, 4, 20)
    np.testing.assert_allclose(moved, stayed, rtol=0, atol=1e-4)
    assert stayed[0] - stayed[-1] > LEARNT[20], "it must have learnt something"
