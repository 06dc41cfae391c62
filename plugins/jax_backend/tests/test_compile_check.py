"""Gates of cost: what the compiler makes of a training program is what was planned, on a mesh of simulated devices."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tinsmith import ConfigError
from tinsmith_jax.compile_check import compiling
from tinsmith_jax.compile_check.chips import read_slice
from tinsmith_jax.compile_check.collectives import traffic
from tinsmith_jax.compile_check.figures import Facts, Figures, analysed
from tinsmith_jax.compile_check.hlo import read_module
from tinsmith_jax.compile_check.model_shapes import SHAPES, read_model
from tinsmith_jax.compile_check.options import PROGRAMS, Options, read_mesh
from tinsmith_jax.compile_check.report import communication_table, paragraph, table
from tinsmith_jax.compile_check.work import hbm_bytes, product_flops

Json = dict[str, Any]


GRADIENTS, STEP = "all axes, gradients", "all axes, step"
MORE = (
    "all axes, score",
    "all axes, gradients, kept",
    "fsdp, gradients",
    "tensor, gradients",
    "one device, gradients",
)
"""The last form keeps activations instead of computing them again."""

PASSES = [GRADIENTS, *(pytest.param(name, marks=pytest.mark.thorough) for name in MORE)]


@pytest.fixture(scope="module")
def planned(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Json:
    """Run planned_programs.py for all programs that the chosen tests ask for."""
    asked = {item.callspec.params.get("name") for item in request.session.items if hasattr(item, "callspec")}
    names = [GRADIENTS, STEP, *(name for name in MORE if name in asked)]
    directory = tmp_path_factory.mktemp("planned") / "tiny"
    done = subprocess.run(
        [sys.executable, Path(__file__).with_name("planned_programs.py"), directory, *names],
        env={**os.environ, "JAX_DISABLE_MOST_OPTIMIZATIONS": "1", "XLA_FLAGS": "--xla_cpu_use_fusion_emitters=false"},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    result: Json = json.loads(done.stdout)
    return result


@pytest.mark.parametrize("name", PASSES)
def test_the_collectives_are_those_of_the_plan_and_no_others(planned: Json, name: str) -> None:
    figures = planned["figures"][name]
    assert figures["found"] == figures["planned"]
    assert bool(figures["planned"]) == ("one device" not in name)


@pytest.mark.parametrize("name", PASSES)
def test_flops_are_those_of_the_formula(planned: Json, name: str) -> None:
    figures = planned["figures"][name]
    assert figures["flops"] == pytest.approx(figures["formula"], rel=0.1)


def test_weights_are_gathered_twice_and_nothing_else_is_large(planned: Json) -> None:
    gathered = planned["figures"][GRADIENTS]["bytes"]["all-gather fsdp"]
    layers, hidden, inner, vocabulary, shards, tokens = 3, 128, 256, 512, 2, 2 * 256
    matrices = hidden * (4 + 2 * 2) * 32 + 4 * 32 * hidden + 3 * hidden * inner
    assert gathered == 4 * ((2 * layers * matrices + vocabulary * hidden) // shards + tokens)


def test_an_optimizer_step_sends_norms_only(planned: Json) -> None:
    figures = planned["figures"][STEP]
    assert {kind for kind, _, _ in figures["found"]} <= {"all-reduce"}
    assert sum(figures["bytes"].values()) < 1000


@pytest.mark.parametrize("name", [*PASSES, STEP])
def test_bytes_on_a_chip_are_what_the_compiler_counts(planned: Json, name: str) -> None:
    figures = planned["figures"][name]
    for ours, compiler in (figures["arguments"], figures["results"]):
        assert ours == pytest.approx(compiler, rel=1e-3, abs=100)  # it counts the pointers of tuples
    assert figures["state"] <= figures["arguments"][0] < figures["state"] + 50_000  # the rest are streams and scalars


def test_every_program_can_be_asked_for(planned: Json) -> None:
    assert tuple(planned["kinds"]) == PROGRAMS


def test_the_base_that_is_compiled_for_is_the_one_that_is_loaded(planned: Json) -> None:
    loaded, compiled = planned["base"]
    assert loaded == compiled


# Reading programs -----------------------------------------------------------------------------------------------------

TPU_PROGRAM = Path(__file__).with_name("tpu_program.txt").read_text(encoding="utf-8")
"""What a TPU compiler writes, cut down to four layers of one gathered matrix, a batch of products and a sum."""

MESH = {"data": 1, "fsdp": 2, "tensor": 2}


def test_products_count_as_often_as_their_loop_runs_and_without_the_gaps_of_a_batch() -> None:
    assert product_flops(read_module(TPU_PROGRAM)) == 4 * 2 * 8 * 128 * 128 + 2 * 16 * 64 * 32 * 96


@pytest.mark.parametrize("groups", ["{{0,1},{2,3}}", "[2,2]<=[4]", "mesh['axis_0'=2,'axis_1'=2] {'axis_1'}"])
def test_asynchronous_collectives_count_once_and_by_axis(groups: str) -> None:
    gather, reduce = traffic(read_module(TPU_PROGRAM.replace("[2,2]<=[4]", groups)), MESH)
    assert (gather.kind, gather.axis, gather.count, gather.num_bytes) == ("all-gather", "fsdp", 4, 4 * 128 * 128 * 2)
    assert gather.received == gather.num_bytes / 2
    assert (reduce.kind, reduce.axis, reduce.count) == ("all-reduce", "tensor", 2)
    assert reduce.received == reduce.num_bytes == 4 * (8 * 128 + 8)


def test_only_slices_of_the_weights_are_read_from_hbm_and_the_rest_stays_on_the_chip() -> None:
    part, index = 128 * 64 * 2, 4
    summed = 8 * 128 * 4 + 8 * 4 + 2 * 8 * 128 * 2
    assert hbm_bytes(read_module(TPU_PROGRAM)) == 4 * (3 * part + index) + summed


# Asking ---------------------------------------------------------------------------------------------------------------


def _figures(**changed: object) -> Figures:
    options = Options.model_validate(
        {
            "topology": "v6e:2x2", "model": "Qwen3-8B", "mesh": {"fsdp": 2, "tensor": 2}, "tenants": 3, "rank": 8,
            "context": 64, "tokens": 128, **changed,
        }
    )  # fmt: skip
    facts = Facts(
        base_bytes=10 << 30, tenant_bytes=6 << 30, zeros_bytes=0, state_bytes=100, streams=2, adapters=8,
        formula={"base": 4e12, "attention": 1e12}, model_flops=3e12, attention_steps=1, attention_is_hidden=True,
        planned=[("all-gather", "fsdp", 4), ("all-reduce", "tensor", 3)],
    )  # fmt: skip
    compiled = analysed(TPU_PROGRAM, 1 << 30, MESH, 1).model_copy(update={"flops": 4e12})
    return Figures(options=options, program="gradients", facts=facts, compiled=compiled)


def test_what_all_tenants_hold_counts_besides_the_program() -> None:
    assert _figures().fits
    assert not _figures(tenants=4).fits


def test_the_report_names_what_differs_from_the_plan() -> None:
    text = paragraph(_figures())
    assert "+0.0 % of the formula" in text
    assert "not as planned: all-reduce over tensor: 2 arrays instead of 3" in text
    assert "all-gather over fsdp: 4 arrays instead" not in text


def test_the_time_at_the_roofline_includes_what_a_kernel_computes() -> None:
    assert _figures().seconds().compute == pytest.approx(5e12 / 918e12)
    assert "| Qwen3-8B | v6e:2x2 | fsdp=2,tensor=2 | 3 | 128 |" in table([_figures()])


def test_what_is_sent_is_told_per_token() -> None:
    row = communication_table([_figures()]).splitlines()[-1]
    received = 4 * 128 * 128 + 4 * (8 * 128 + 8)
    assert row.endswith(f"| 256 | 0.00 | 0.00 | 0.00 | {received * 4 / 256 / 1024:,.0f} |")


def test_slices_and_meshes_are_read() -> None:
    assert read_slice("v5p:4x4x4").num_chips == 64
    assert read_mesh("fsdp=4,tensor=2").fsdp == 4


@pytest.mark.parametrize(
    ("ask", "says"),
    [
        (lambda: read_slice("v7:2x2"), "known: v5e, v5p, v6e"),
        (lambda: read_slice("v6e:2x2x2"), "has 2 dimensions, for example v6e:4x4"),
        (lambda: read_mesh("rows=2"), "rows=2 is not one of data, fsdp, tensor"),
        (lambda: read_mesh("fsdp=two"), "fsdp=two is not one of"),
        (lambda: read_model("Qwen9"), "give a directory with config.json, or one of Qwen3-8B"),
    ],
)
def test_mistakes_are_named(ask: Any, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        ask()


def test_without_the_compiler_the_command_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiling.importlib.util, "find_spec", lambda _: None)
    with pytest.raises(ConfigError, match=r"tinsmith-jax\[tpu\]"):
        compiling.require_compiler()


@pytest.mark.parametrize("name", SHAPES)
def test_named_shapes_can_be_divided_among_four(name: str) -> None:
    model = read_model(name)
    assert model.num_kv_heads % 4 == 0
    assert model.head_dim == 128
