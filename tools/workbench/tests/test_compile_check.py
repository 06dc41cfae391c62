"""Gates of cost: what the compiler makes of a program is what was planned, on a mesh of simulated devices."""

import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from jax_harness import QUICK
from planned_programs import KINDS

from tinsmith import ConfigError
from tinsmith_checkpoints.huggingface.known_shapes import KNOWN_SHAPES
from tinsmith_jax.config import MeshConfig
from tinsmith_jax.mesh import Axes, arranged, check_shape
from tinsmith_workbench.compile_check import compiling
from tinsmith_workbench.compile_check.chips import read_slice
from tinsmith_workbench.compile_check.collectives import traffic
from tinsmith_workbench.compile_check.figures import Facts, Figures, analysed
from tinsmith_workbench.compile_check.hlo import read_module
from tinsmith_workbench.compile_check.model_shapes import read_model
from tinsmith_workbench.compile_check.options import PROGRAMS, Options, read_mesh
from tinsmith_workbench.compile_check.report import paragraph
from tinsmith_workbench.compile_check.tables import passes, read_lines, sampling, scaling, slices
from tinsmith_workbench.compile_check.work import hbm_bytes, product_flops

pytestmark = pytest.mark.thorough  # the workbench is no part of the daily path

Json = dict[str, Any]


GRADIENTS, STEP = "all axes, gradients", "all axes, step"
DECODE, ONCE, PREFILL = "all axes, decode", "all axes, decode, once", "all axes, prefill"
MORE = (
    PREFILL,
    "all axes, score",
    "all axes, gradients, kept",
    "fsdp, gradients",
    "tensor, gradients",
    "one device, gradients",
    "fsdp, step",
    "fsdp, decode",
    "tensor, decode",
    "tensor, prefill",
    "one device, decode",
)
""""kept": activations, instead of computing them again. "once": weights are gathered at the start of a dispatch."""

EVERY = [GRADIENTS, STEP, DECODE, ONCE, *MORE]

FURTHER = tuple(
    f"{kind} on {mesh}, {program}"
    for kind in KINDS
    for mesh in ("one device", "streams", "all axes")
    for program in (*PROGRAMS, "gradients, kept", "decode, once")
    if not (kind.startswith("Mamba") and mesh == "all axes")
)
OF_KINDS = [*FURTHER]
"""The same of the other kinds of layers. `tensor` does not divide Mamba-2."""


@pytest.fixture(scope="module")
def planned(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Json:
    """Run planned_programs.py for all programs that the chosen tests ask for."""
    asked = {item.callspec.params.get("name") for item in request.session.items if hasattr(item, "callspec")}
    names = [GRADIENTS, STEP, DECODE, ONCE, *(name for name in (*MORE, *FURTHER) if name in asked)]
    directory = tmp_path_factory.mktemp("planned") / "tiny"
    flags = " ".join(f"--{name}={str(value).lower()}" for name, value in QUICK.items())
    done = subprocess.run(
        [sys.executable, Path(__file__).with_name("planned_programs.py"), directory, *names],
        env={**os.environ, "JAX_DISABLE_MOST_OPTIMIZATIONS": "1", "XLA_FLAGS": flags},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    result: Json = json.loads(done.stdout)
    return result


@pytest.mark.parametrize("name", [*EVERY, *OF_KINDS])
def test_the_collectives_are_those_of_the_plan_and_no_others(planned: Json, name: str) -> None:
    figures = planned["figures"][name]
    assert figures["found"] == figures["planned"]
    assert bool(figures["planned"]) == ("one device" not in name)


@pytest.mark.parametrize("name", [*EVERY, *OF_KINDS])
def test_flops_are_those_of_the_formula(planned: Json, name: str) -> None:
    figures = planned["figures"][name]
    assert figures["flops"] == pytest.approx(figures["formula"], rel=0.1)


def test_weights_are_gathered_twice_and_nothing_else_is_large(planned: Json) -> None:
    gathered = planned["figures"][GRADIENTS]["bytes"]["all-gather fsdp"]
    layers, hidden, inner, vocabulary, shards, tokens = 3, 128, 256, 512, 2, 2 * 256
    matrices = hidden * (4 + 2 * 2) * 32 + 4 * 32 * hidden + 3 * hidden * inner
    assert gathered == 4 * ((2 * layers * matrices + vocabulary * hidden) // shards + tokens)


def test_an_optimizer_step_joins_new_weights_and_sends_nothing_else_that_is_large(planned: Json) -> None:
    figures = planned["figures"][STEP]
    arrays = 16
    assert figures["bytes"].pop("all-gather fsdp") == _adapter_bytes(tensor=2)
    assert sum(figures["bytes"].values()) == 2 * arrays * 4  # sums of squares, over fsdp and over tensor


def test_decoding_gathers_the_layers_once_for_each_token(planned: Json) -> None:
    gathered = planned["figures"][DECODE]["bytes"]["all-gather fsdp"]
    layers, hidden, inner, vocabulary, shards, steps, slots = 3, 128, 256, 512, 2, 8, 3
    matrices = hidden * (4 + 2 * 2) * 32 + 4 * 32 * hidden + 3 * hidden * inner
    assert gathered == 4 * ((steps * layers * matrices + vocabulary * hidden) // shards + steps * shards * slots)


def test_decoding_gathers_all_weights_at_its_start_if_told_to(planned: Json) -> None:
    gathered = planned["figures"][ONCE]["bytes"]["all-gather fsdp"]
    layers, hidden, inner, vocabulary, shards = 3, 128, 256, 512, 2
    matrices = hidden * (4 + 2 * 2) * 32 + 4 * 32 * hidden + 3 * hidden * inner
    assert gathered == 4 * (layers * matrices + 2 * vocabulary * hidden) // shards


@pytest.mark.parametrize("name", [DECODE, PREFILL])
def test_whole_pages_are_written_to_the_cache(planned: Json, name: str) -> None:
    """Else the compiler for TPUs gives the cache another layout for writing, and copies all of it in each layer."""
    kv_heads, head_dim, page = 2 // 2, 32, 64
    key, value = [1, 1, kv_heads, head_dim, page], [1, 1, kv_heads, page, head_dim]
    assert sorted(planned["figures"][name]["cache_writes"]) == sorted([key, value])


def _adapter_bytes(*, tensor: int) -> int:
    """Return the bytes of an adapter of rank 8 on a shard."""
    layers, hidden, q, kv, inner, vocabulary = 3, 128, 128, 64, 256, 512
    rows = layers * (7 * hidden + (2 * q + 2 * kv + 3 * inner) // tensor) + hidden + vocabulary // tensor
    return 4 * 8 * rows


@pytest.mark.parametrize("name", [*EVERY, *OF_KINDS])
def test_bytes_on_a_chip_are_what_the_compiler_counts(planned: Json, name: str) -> None:
    figures = planned["figures"][name]
    for ours, compiler in (figures["arguments"], figures["results"]):
        assert ours == pytest.approx(compiler, rel=1e-3, abs=100)
    assert figures["state"] <= figures["arguments"][0] < figures["state"] + 50_000  # the rest are streams and scalars


@pytest.mark.parametrize("name", [*EVERY, *OF_KINDS])
def test_what_plans_count_lies_on_a_chip(planned: Json, name: str) -> None:
    for what, (counted, found) in planned["figures"][name]["held"].items():
        assert counted == found, what


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


LOOPS = """\
HloModule loops, entry_computation_layout={(f32[8,8]{1,0}, pred[])->f32[8,8]{1,0}}

%body (x: f32[8,8]) -> f32[8,8] {
  %x = f32[8,8]{1,0} parameter(0)
  ROOT %dot = f32[8,8]{1,0} dot(%x, %x), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}

%condition (y: f32[8,8]) -> pred[] {
  %y = f32[8,8]{1,0} parameter(0)
  ROOT %more = pred[] custom-call(%y), custom_call_target="more"
}

ENTRY %main (z: f32[8,8], flag: pred[]) -> f32[8,8] {
  %z = f32[8,8]{1,0} parameter(0)
  %flag = pred[] parameter(1)
  %named = f32[8,8]{1,0} while(%z), condition=%condition, body=%body, metadata={op_name="jit(f)/attend/while"}
  %other = f32[8,8]{1,0} while(%named), condition=%condition, body=%body, metadata={op_name="jit(f)/while"}
  ROOT %chosen = f32[8,8]{1,0} conditional(%flag, %other, %other), true_computation=%body, false_computation=%body, \
metadata={op_name="jit(f)/truncate/cond"}
}
"""


@pytest.mark.parametrize(
    ("trips", "products"), [({}, 1 + 1 + 2), ({"attend": 5, "": 3}, 5 + 3 + 2), ({"attend": 5, "truncate": 0}, 5 + 1)]
)
def test_what_only_data_decide_is_counted_by_its_scope(trips: dict[str, float], products: int) -> None:
    assert product_flops(read_module(LOOPS), trips) == products * 2 * 8**3


CHAIN = """\
HloModule chain, entry_computation_layout={(bf16[64,128]{1,0})->bf16[128,128]{1,0}}

%start (part: bf16[64,128]) -> bf16[128,128] {
  %part = bf16[64,128]{1,0} parameter(0)
  ROOT %gather = bf16[128,128]{1,0} all-gather(%part), channel_id=2, replica_groups={{0,1}}, dimensions={0}, \
frontend_attributes={chain_id="0"}, \
backend_config={"async_collective_fusion_config":{"flag_end":"-1","flag_start":"-1"}}
}

%done (whole: bf16[128,128]) -> bf16[128,128] {
  %whole = bf16[128,128]{1,0} parameter(0)
  ROOT %gather.1 = bf16[128,128]{1,0} all-gather(%whole), channel_id=2, replica_groups={{0,1}}, dimensions={0}, \
frontend_attributes={chain_id="0"}, \
backend_config={"async_collective_fusion_config":{"flag_end":"8","flag_start":"2"}}
}

ENTRY %main (x: bf16[64,128]) -> bf16[128,128] {
  %x = bf16[64,128]{1,0} parameter(0)
  %started = bf16[128,128]{1,0} fusion(%x), kind=kCustom, calls=%start
  ROOT %end = bf16[128,128]{1,0} fusion(%started), kind=kCustom, output_to_operand_aliasing={{}: (0, {})}, calls=%done
}
"""


def test_a_collective_in_parts_beside_arithmetic_counts_once() -> None:
    module, part = read_module(CHAIN), 64 * 128 * 2
    (gather,) = traffic(module, {"data": 1, "fsdp": 2, "tensor": 1})
    assert (gather.count, gather.num_bytes) == (1, 2 * part)
    assert hbm_bytes(module) == part + 2 * part


# Asking ---------------------------------------------------------------------------------------------------------------


def _figures(**changed: object) -> Figures:
    options = Options.model_validate(
        {
            "topology": "v6e:2x2", "model": "Qwen3-8B", "mesh": {"fsdp": 2, "tensor": 2}, "tenants": 3, "rank": 8,
            "context": 64, "tokens": 128, "slots": 2, **changed,
        }
    )  # fmt: skip
    facts = Facts(
        base_bytes=10 << 30, tenant_bytes=6 << 30, zeros_bytes=0, sampling_bytes=1 << 30, state_bytes=100, streams=2,
        adapters=8, formula={"base": 4e12, "attention": 1e12}, model_flops=3e12,
        counted_hbm_bytes={"base": hbm_bytes(read_module(TPU_PROGRAM))}, tokens=256, trips={"": 1},
        links={"fsdp": 2, "tensor": 1}, attention_is_hidden=True,
        planned=[("all-gather", "fsdp", 4), ("all-reduce", "tensor", 3)],
    )  # fmt: skip
    compiled = analysed(TPU_PROGRAM, 1 << 30, MESH, {}).model_copy(update={"flops": 4e12})
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
    assert "| Qwen3-8B | v6e:2x2 | fsdp=2,tensor=2 | 3 | 128 |" in passes([_figures()])


def test_what_is_sent_is_told_per_token() -> None:
    row = scaling([_figures()]).splitlines()[-1]
    received = 4 * 128 * 128 + 4 * (8 * 128 + 8)
    assert f"| 256 | 0.00 | 0.00 | 0.00 | {received * 4 / 256 / 1024:,.0f} |" in row


@pytest.mark.parametrize("program", ["gradients", "decode", "prefill"])
@pytest.mark.parametrize(("what", "says"), [("hbm_bytes", "move"), ("flops", "compute")])
def test_a_program_that_is_misread_has_no_time(program: str, what: str, says: str) -> None:
    figures = _figures().model_copy(update={"program": program, "compiler": "jax 9, libtpu 9"})
    assert figures.doubt is None
    misread = _misread(figures, what, 2)
    text = paragraph(misread)
    assert f"seems to {says} 2.00 times what is counted for its shape, so jax 9, libtpu 9 writes it in a way" in text
    assert "tokens/s" not in text
    other = _figures().model_copy(update={"program": "prefill" if program == "decode" else "decode"})
    row = (passes([misread]) if program == "gradients" else sampling([misread, other])).splitlines()[-1]
    assert re.search(r"\|  \|  \|  \| .*jax 9, libtpu 9 \|$", row), "no speeds"


def _misread(figures: Figures, what: str, times: float) -> Figures:
    assert figures.compiled is not None
    changed = {what: times * getattr(figures.compiled, what)}
    return figures.model_copy(update={"compiled": figures.compiled.model_copy(update=changed)})


def test_each_row_that_is_published_is_believed_and_names_its_compiler() -> None:
    assert [row.doubt for row in _published() if row.doubt] == []
    assert all(re.fullmatch(r"jax [\d.]+, libtpu [\d.]+", row.compiler) for row in _published())


def test_none_of_them_would_be_believed_if_its_traffic_were_misread_by_a_factor_of_two() -> None:
    """With another libtpu, the same program read 14,940, 1,995 or 24 tokens a second, and each was an estimate."""
    rows = [row for row in _published() if row.compiled]
    believed = [
        (row.program, row.options.model, str(row.slice), times)
        for row in rows
        for times in (1 / 3, 1 / 2, 2, 3)
        if not _misread(row, "hbm_bytes", times).doubt
    ]
    assert believed == []
    assert {row.program for row in rows} == set(PROGRAMS)


def _published() -> list[Figures]:
    return read_lines((Path(__file__).parents[3] / "docs" / "reference" / "tpu.jsonl").read_text())


def test_the_extra_the_image_and_the_development_environment_have_one_compiler() -> None:
    root = Path(__file__).parents[3]
    project = tomllib.loads((root / "plugins/jax_backend/pyproject.toml").read_text())["project"]
    pinned = dict(each.replace("[tpu]", "").split("==") for each in project["optional-dependencies"]["tpu"])
    assert pinned.keys() == {"jax", "libtpu"}
    assert f"jax=={pinned['jax']}" in (root / "constraints.txt").read_text().splitlines()
    assert "-c constraints.txt" in (root / "deploy/Dockerfile").read_text()


def test_a_collective_has_the_links_of_its_axis() -> None:
    figures = _figures()
    gathered, summed = 4 * 128 * 128, 4 * (8 * 128 + 8)
    assert figures.seconds().links == pytest.approx((gathered / 2 + summed) / 100e9)


def test_a_cell_of_a_slice_has_memory_and_speeds() -> None:
    *_, row = slices([_figures(tenants=4), _figures()]).splitlines()
    assert row.startswith("| Qwen3-8B | v6e |  | 30.0 GiB; ")
    assert "**no**: 36.0 GiB" in slices([_figures(tenants=4)])


def test_sampling_needs_both_programs_for_a_row() -> None:
    decode, prefill = (_figures().model_copy(update={"program": name}) for name in ("decode", "prefill"))
    assert "| Qwen3-8B | v6e:2x2 | fsdp=2,tensor=2 | 4 | 10.0 | 1.0 |" in sampling([decode, prefill])
    assert "Qwen3-8B" not in sampling([decode])


@pytest.mark.parametrize(
    ("topology", "places", "links"),
    [
        ("v6e:4x4", [(0, 0, 0), (1, 0, 0), (2, 0, 0), (3, 0, 0)], 1),
        ("v6e:4x4", [(0, 0, 0), (1, 0, 0), (0, 1, 0), (1, 1, 0)], 2),
        ("v6e:16x16", [(x, 0, 0) for x in range(16)], 2),
        ("v6e:16x16", [(x, 0, 0) for x in range(8)], 1),
        ("v6e:16x16", [(x, 0, 0) for x in range(0, 16, 4)], 0.5),
        ("v6e:4x4", [(0, 0, 0), (2, 0, 0)], 0.5),
        ("v5p:2x2x4", [(x, y, z) for x in range(2) for y in range(2) for z in range(4)], 4),
    ],
)
def test_only_whole_rings_bring_data_from_both_sides(
    topology: str, places: list[tuple[int, ...]], links: float
) -> None:
    assert read_slice(topology).links(places) == links


def test_chips_of_an_axis_are_neighbours() -> None:
    """As libtpu describes the slice v6e:4x4: four hosts, each with a square of chips."""
    devices = [
        SimpleNamespace(
            id=number, platform="tpu", device_kind="TPU v6 lite", process_index=number // 4, slice_index=0,
            core_on_chip=0, coords=(number // 4 % 2 * 2 + number % 2, number // 8 * 2 + number // 2 % 2, 0),
        )
        for number in range(16)
    ]  # fmt: skip
    found = arranged(devices, Axes(fsdp=4, tensor=4))
    assert [each.coords for each in found[0, 0]] == [(x, 0, 0) for x in range(4)]
    assert [each.coords for each in found[0, :, 0]] == [(0, y, 0) for y in range(4)]


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
        (lambda: read_model("Qwen9"), "give a directory with config.json, or one of Qwen3-0.6B"),
    ],
)
def test_mistakes_are_named(ask: Any, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        ask()


def test_without_the_compiler_the_command_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiling.importlib.util, "find_spec", lambda _: None)
    with pytest.raises(ConfigError, match=r"jax_backend\[tpu\]"):
        compiling.require_compiler()


@pytest.mark.parametrize("name", KNOWN_SHAPES)
def test_well_known_models_can_be_divided_among_four(name: str) -> None:
    assert check_shape(MeshConfig(fsdp=4), read_model(name)).num_devices == 4
