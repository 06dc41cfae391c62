"""`tinsmith megatron-plan`: which layouts it knows, what it says of them, and what it refuses. No torch."""

import json
import math
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from workbench_harness import typed

from tinsmith import ConfigError
from tinsmith_checkpoints.huggingface import DecoderShape, DeltaRule, ExpertShape, HybridShape, known_config
from tinsmith_megatron.config import MegatronConfig
from tinsmith_megatron.parallel import Layout, Work, check_model, check_ranks
from tinsmith_workbench.layouts.choosing import layouts, planned
from tinsmith_workbench.layouts.command import read_shape
from tinsmith_workbench.layouts.cost import cost
from tinsmith_workbench.layouts.machine import GB, Machine
from tinsmith_workers import delta_flops

MACHINE = Machine()


def asked(*arguments: str) -> str:
    return typed("megatron-plan", *arguments)


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


@pytest.mark.parametrize("name", ["Llama-3-8B", "Qwen3.5-4B"])
def test_a_directory_is_planned_as_its_shape_is_named(name: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(known_config(name)))
    named, of_directory = (asked("--model", model, "--gpus", "8") for model in (name, str(tmp_path)))
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
        asked(*arguments)


@pytest.mark.thorough
def test_planning_imports_no_torch() -> None:
    code = (
        "import sys\nfrom tinsmith_workbench.layouts.command import megatron_plan\n"
        "megatron_plan('Qwen3-8B', 8)\nassert not {'torch', 'megatron'} & sys.modules.keys()\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
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


def test_flops_of_a_hybrid_with_experts_by_hand() -> None:
    """One layer has the gated delta rule, one attends; a token meets two experts, and a shared one."""
    rule = DeltaRule(key_heads=2, value_heads=4, key_dim=8, value_dim=16, width=4)
    experts = ExpertShape(num_experts=8, top_k=2, intermediate_size=12, normalized=True, shared_size=20)
    shape = HybridShape(
        class_name="Qwen3_5MoeForCausalLM", vocab_size=100, hidden_size=32, intermediate_size=12, num_layers=2,
        num_heads=4, num_kv_heads=2, head_dim=8, max_position=64, tied=False, experts=experts, delta=rule,
        delta_layers=(0,),
    )  # fmt: skip
    work = Work(rank=4, tenants=1, tokens=64, context=64, step_tokens=64)
    found = cost(shape, Layout(tp=1, pp=1, ep=1, dp=1, recompute=False), work, MACHINE).flops / 64
    delta = [(32, 2 * 2 * 8 + 64), (32, 64), (32, 4), (32, 4), (64, 32)]  # queries, keys and values; gate; b; a; output
    attending = [(32, 2 * 32), (32, 16), (32, 16), (32, 32)]  # with a gate
    met = [*[(32, 20), (32, 20), (20, 32)], *[(32, 12), (32, 12), (12, 32)] * 2]
    plain = [*delta, *attending, *met * 2]
    layers = sum(inputs * outputs for inputs, outputs in plain) + 2 * 32 * (8 + 1)  # routers, and shared experts' gates
    sides = sum(inputs + outputs for inputs, outputs in plain) + 32 + 100
    head, attention = 32 * 100, 4 * 32 * 32
    assert found == 4 * (layers + head) + 3.5 * attention + 4 * delta_flops(rule) + 3 * 2 * 4 * sides


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
