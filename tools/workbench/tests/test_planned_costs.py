"""The memory that the JAX backend counts without jax, against libtpu's plans in docs/reference/tpu.md."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tinsmith_jax.costs import Computing, Costs
from tinsmith_workbench.compile_check import tables
from tinsmith_workbench.compile_check.figures import Figures
from tinsmith_workbench.compile_check.model_shapes import read_model

pytestmark = pytest.mark.thorough


def planned() -> Iterator[Figures]:
    """Yield what libtpu has planned for every program of docs/reference/tpu.md."""
    reference = Path(__file__).parents[3] / "docs" / "reference" / "tpu.jsonl"
    return (each for each in tables.read_lines(reference.read_text(encoding="utf-8")) if each.compiled is not None)


def costs_of(figures: Figures) -> Costs:
    options = figures.options
    computing = Computing(on_cpu=False, dtype=options.dtype, recompute=options.recompute, **options.mesh.model_dump())
    return Costs(shape=read_model(options.model), computing=computing, max_lora_rank=options.rank)


def test_what_lies_on_a_chip_is_what_is_counted() -> None:
    """Of any mesh: exactly."""
    meshes = set()
    for figures in planned():
        costs, options, facts = costs_of(figures), figures.options, figures.facts
        assert costs.base == facts.base_bytes
        assert costs.model(options.rank) == facts.tenant_bytes
        assert costs.zeros == facts.zeros_bytes
        if facts.sampling_bytes:
            assert costs.rows(options.slots) + costs.pages(options.slots, options.context) == facts.sampling_bytes
        meshes.add((options.model, str(options.mesh)))
    assert len(meshes) > 20


@pytest.mark.parametrize(("program", "of_all"), [("gradients", 0.1), ("decode", 0.04)])
def test_a_chip_takes_what_is_counted(program: str, of_all: float) -> None:
    """A pass with gradients within an eighth, and with what lies there anyway within a tenth."""
    number = 0
    for figures in planned():
        options, facts, needed = figures.options, figures.facts, figures.needed_bytes
        if figures.program == program:
            assert needed is not None
            costs, own, number = costs_of(figures), needed - figures.held_bytes, number + 1
            if program == "gradients":
                counted = costs.micro_batch(options.tokens, facts.adapters)
                assert counted == pytest.approx(own, rel=0.125)
            else:
                counted = costs.sampling(options.slots, gathers_once=facts.gathers_once)
            assert counted == pytest.approx(own, abs=of_all * needed)
    assert number > 20
