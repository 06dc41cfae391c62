"""Scripts through the unmodified SDK: `tinsmith serve` with FSDP ranks as trainer, JAX as sampler."""

import json
import subprocess
import sys
from pathlib import Path

import fine_tune_fully
import pytest
from fsdp_harness import forking

from tinsmith.settings import ModelSettings
from tinsmith.testing import TinyShape, write_tiny_model
from tinsmith.testing.harness import running_server
from tinsmith.testing.int8_model import write_int8_model
from tinsmith.testing.served_process import served_process, without_settings

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning"),  # connections that the SDK leaves to the collector
    pytest.mark.filterwarnings("ignore:DEPRECATED. TrainingClient.load_state:FutureWarning"),
]

SCRIPT = Path(__file__).parents[3] / "examples" / "pig_latin.py"
FULL_SCRIPT = Path(fine_tune_fully.__file__)
LIMIT_S = 540


@pytest.fixture
def model(tmp_path: Path) -> dict[str, object]:
    path = tmp_path / "model"
    write_tiny_model(path, TinyShape(num_layers=2))
    return {
        "name": "tiny",
        "path": str(path),
        "backend": {"plugin": "fsdp", "device": "cpu", "nproc_per_node": 2, "max_context_tokens": 256},
        "sampler": {"plugin": "jax", "max_context_tokens": 256, "warm_up": False},
    }


def without_sampler(model: dict[str, object]) -> dict[str, object]:
    """The jax sampler takes adapters alone, so beside it no model is created of which all weights are trained."""
    return {**model, "name": "full", "sampler": {"plugin": "none"}}


def test_all_weights_are_trained_through_the_sdk(tmp_path: Path, model: dict[str, object]) -> None:
    models = [ModelSettings.model_validate(without_sampler(model))]
    with forking(), running_server(tmp_path / "data", models=models) as server:
        fine_tune_fully.main(server.url)


@pytest.mark.thorough  # above, the server and its engine in this process
@pytest.mark.timeout(900)
@pytest.mark.parametrize("int8", [False, True])
def test_scripts_on_two_ranks_and_the_jax_sampler(int8: bool, tmp_path: Path, model: dict[str, object]) -> None:
    if int8:
        write_int8_model(tmp_path / "model", tmp_path / "int8", group_size=32)
        model = {**model, "path": str(tmp_path / "int8")}
    settings = {"models": [model, *([] if int8 else [without_sampler(model)])]}
    with served_process(tmp_path, settings) as server:
        for script in (SCRIPT,) if int8 else (SCRIPT, FULL_SCRIPT):
            arguments = [server.url] if script == FULL_SCRIPT else ["--base-url", server.url, "--base-model", "tiny"]
            done = subprocess.run(
                [sys.executable, str(script), *arguments],
                capture_output=True,
                text=True,
                timeout=LIMIT_S,
                env=without_settings(),
                check=False,
            )
            assert done.returncode == 0, done.stdout + done.stderr + server.log.read_text()


OTHERS = ("limits", "peft_training", "drawing", "sampling", "plain_vllm", "served")


@pytest.mark.thorough  # tests/unit/test_gpu_benchmark.py has its limits and what it keeps
@pytest.mark.parametrize(
    "parts",
    [
        pytest.param(("training",), id="training"),
        pytest.param(OTHERS, id="others"),
    ],
)
@pytest.mark.timeout(900)
def test_the_gpu_benchmark_runs_on_a_cpu(parts: tuple[str, ...], tmp_path: Path) -> None:
    script = Path(__file__).parents[3] / "benchmarks" / "gpu.py"
    out = tmp_path / "report.json"
    command = [sys.executable, str(script), "--toy", "--repeats", "1", "--out", str(out), "--parts", *parts]
    command += ["--part-timeout-s", str(LIMIT_S), "--within-s", str(LIMIT_S)]
    subprocess.run(command, check=True, timeout=LIMIT_S, stdout=subprocess.DEVNULL, env=without_settings())
    report = json.loads(out.read_text())
    assert list(report) == ["run", *parts]
    assert not [part for part in parts if "not_measured" in report[part]]
