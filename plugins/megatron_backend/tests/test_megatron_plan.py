"""`tinsmith-megatron plan`: which layouts it knows, what it says of them, and what it refuses. No torch."""

import json
import math
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from tinsmith import ConfigError, LoraConfig
from tinsmith.huggingface import DecoderShape, known_config
from tinsmith.workers import AdapterLayout
from tinsmith_megatron.config import MegatronConfig
from tinsmith_megatron.parallel import check_model, check_ranks
from tinsmith_megatron.plan.command import app, group, read_shape
from tinsmith_megatron.plan.cost import cost
from tinsmith_megatron.plan.layouts import layouts, planned
from tinsmith_megatron.plan.memory import adapter_sizes, weights_of
from tinsmith_megatron.plan.work import GB, Layout, Machine, Work

ALONE = Layout(tp=1, pp=1, ep=1, dp=1, recompute=False)
MACHINE = Machine()


def asked(*arguments: str) -> str:
    result = CliRunner().invoke(group, ["plan", *arguments], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


@pytest.mark.parametrize(("rank", "nodes"), [(32, 1), (32, 8), (0, 8)])
def test_the_configuration_is_ready(rank: int, nodes: int) -> None:
    """What is printed is read by the backend, divides the model, and has the layout of the first row."""
    printed = asked("--model", "Qwen3-30B-A3B", "--gpus", str(8 * nodes), "--rank", str(rank))
    head, _, text = printed.partition("models:")
    (model,) = yaml.safe_load("models:" + text)["models"]
    backend = dict(model["backend"])
    assert backend.pop("plugin") == "megatron"
    config = MegatronConfig.model_validate(backend)
    shape = read_shape("Qwen3-30B-A3B")
    check_model(config, shape)
    check_ranks(config, 8 * nodes)
    assert (config.nnodes, config.nproc_per_node) == (nodes, 8)
    lines = head.splitlines()
    first = lines[lines.index("") + 2].split()
    assert first[:3] == [str(n) for n in (config.tensor_parallel, config.pipeline_parallel, config.expert_parallel)]
    assert first[4] == ("yes" if config.activation_checkpointing else "no")


def test_a_directory_is_planned_as_its_shape_is_named(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(known_config("Llama-3-8B")))
    named, of_directory = (asked("--model", name, "--gpus", "8") for name in ("Llama-3-8B", str(tmp_path)))
    assert named.splitlines()[1:10] == of_directory.splitlines()[1:10]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model", "Qwen4", "--gpus", "8"], r"no model named 'Qwen4': give a directory with"),
        (["--model", "Qwen3-235B-A22B", "--gpus", "8"], r"none of 42 layouts of 8 GPUs fits into 80.0 GB: "),
        (["--model", "Qwen3-8B", "--gpus", "8", "--tokens", "4096"], r"--context 8192 is more than --tokens 4096: "),
    ],
)  # fmt: skip
def test_what_cannot_be_planned_is_said(arguments: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        CliRunner().invoke(group, ["plan", *arguments], catch_exceptions=False)


def test_errors_have_no_traceback(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["tinsmith-megatron", "plan", "--model", "nothing", "--gpus", "8"])
    with pytest.raises(SystemExit, match="2"):
        app()
    assert capsys.readouterr().err.startswith("error: no model named 'nothing'")


@pytest.mark.thorough
def test_planning_imports_no_torch() -> None:
    code = (
        "import sys\nfrom tinsmith_megatron.plan.command import group\ngroup(standalone_mode=False)\n"
        "assert not {'torch', 'megatron'} & sys.modules.keys()\n"
    )
    command = [sys.executable, "-c", code, "plan", "--model", "Qwen3-8B", "--gpus", "8"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_layouts_divide_the_model_and_the_gpus() -> None:
    shape = read_shape("Qwen3-235B-A22B")
    found = list(layouts(shape, 64, MACHINE))
    assert {each.pp for each in found} == {1, 2}, "94 layers"
    assert {each.tp for each in found} == {1, 2, 4}, "4 key-value heads"
    assert {each.ep for each in found} == {1, 2, 4, 8, 16, 32, 64}
    assert all(each.gpus == 64 for each in found)
    assert len(found) == len(set(found))


def test_what_fits_comes_first_and_the_fastest_of_it() -> None:
    found = planned(read_shape("Qwen3-30B-A3B"), 16, Work(), MACHINE)
    assert [each.fits for each in found] == sorted((each.fits for each in found), reverse=True)
    fitting = [each for each in found if each.fits]
    assert all(each.needed_bytes <= 80 * GB for each in fitting)
    times = [each.cost.step_s for each in fitting]
    assert times == sorted(times)
    slower = planned(read_shape("Qwen3-30B-A3B"), 16, Work(), replace(MACHINE, memory_gb=40))
    assert sum(each.fits for each in slower) < len(fitting)


@pytest.mark.parametrize(
    ("name", "billions"), [("Qwen3-30B-A3B", 30.5), ("Qwen3-235B-A22B", 235.1), ("Llama-3-70B", 70.6)]
)
def test_a_model_has_the_weights_of_its_name(name: str, billions: float) -> None:
    shape = read_shape(name)
    assert sum(weights_of(shape, ALONE, ALONE.part(shape, 0))) == pytest.approx(billions * 1e9, rel=2e-3)


@pytest.mark.parametrize("name", ["Qwen3-8B", "Qwen3-30B-A3B"])
def test_adapters_have_the_sizes_of_their_layout(name: str) -> None:
    shape = replace(read_shape(name), num_layers=4)
    layout = Layout(tp=2, pp=2, ep=2 if shape.experts else 1, dp=1, recompute=False)
    for stage in range(2):
        part = layout.part(shape, stage)
        actual = AdapterLayout(LoraConfig(rank=5, seed=0), shape, part)
        assert adapter_sizes(shape, part, 5) == (actual.shared_size, actual.size - actual.shared_size)


def test_time_and_traffic_by_hand() -> None:
    """A dense model of one layer, whose numbers are small enough to be followed."""
    shape = DecoderShape(
        class_name="LlamaForCausalLM", vocab_size=100, hidden_size=8, intermediate_size=16, num_layers=2, num_heads=2,
        num_kv_heads=2, head_dim=4, max_position=64, tied=False,
    )  # fmt: skip
    work = Work(rank=0, tokens=64, context=64, step_tokens=256)
    machine = Machine(tflops=1e-6, efficiency=1, node_gb_s=1e-6, network_gb_s=1e-9)
    found = cost(shape, Layout(tp=2, pp=2, ep=1, dp=1, recompute=True), work, machine)
    layers = 2 * (4 * 8 * 8 + 3 * 8 * 16)
    attention, head = 4 * 2 * 32 * 8, 2 * 100 * 8
    per_token = 3 * (2 * layers + head) + 3.5 * attention + 2 * layers + attention
    assert found.flops == 256 * per_token / 4
    assert found.compute_s == pytest.approx(found.flops / 1e6)
    stream = 64 * 8 * 2  # bytes
    assert found.traffic.tensor == 4 * (3 * 4 + 4) * stream / 2
    assert found.traffic.pipeline == 4 * 2 * stream / 2
    assert found.traffic.expert == 0
    repeated = 2 * 8 + 8  # the norms of the last stage, alone not divided over tp
    assert found.traffic.data == repeated / 2 * (4 + 2)
    links = (found.traffic.tensor + found.traffic.pipeline + found.traffic.data) / 1e3
    assert found.links_s == pytest.approx(links)
    assert found.idle_s == pytest.approx((found.compute_s + links - found.traffic.data / 1e3) / 4)
    assert found.tokens_per_s == pytest.approx(256 / found.step_s)
    assert math.isclose(found.step_s, found.compute_s + found.links_s + found.idle_s)
