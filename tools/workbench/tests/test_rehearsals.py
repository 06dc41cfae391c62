"""docs/reference/fsdp-memory.md: its rows are what the program takes today, and more cards only divide the shards."""

from pathlib import Path

import pytest
from workbench_harness import typed

from tinsmith import ConfigError
from tinsmith_workbench.rehearsal.rows import Row, on_more_cards, read_lines, row_of

FIGURES = read_lines((Path(__file__).parents[3] / "docs" / "reference" / "fsdp-memory.jsonl").read_text())
FEW_BYTES = 64  # offsets of groups


def name_of(row: Row) -> str:
    return "all weights" if row.work.rank == 0 else f"{row.work.tenants} tenants on {row.work.cards}"


def compare(found: Row, expected: Row) -> None:
    for name in Row.model_fields.keys() - {"work"}:
        assert getattr(found, name) == pytest.approx(getattr(expected, name), abs=FEW_BYTES), name


@pytest.mark.parametrize("row", [row for row in FIGURES if row.work.layers], ids=name_of)
def test_two_layers_take_on_eight_cards_what_the_file_says_of_two(row: Row) -> None:
    more = on_more_cards(row, 8)
    compare(row_of(more.work), more)


@pytest.mark.thorough
@pytest.mark.parametrize(
    "row", [row for row in FIGURES if row.work.model == "Qwen3-8B" and not row.work.layers], ids=name_of
)
def test_the_file_says_what_the_program_takes(row: Row) -> None:
    compare(row_of(row.work), row)


def test_what_makes_no_sense_is_refused() -> None:
    with pytest.raises(ConfigError, match="no model named 'nobody'"):
        typed("rehearse", "--model", "nobody", "--cards", "2")
    with pytest.raises(ConfigError, match="one fully trained model at a time"):
        typed("rehearse", "--model", "Qwen3-8B", "--cards", "2", "--rank", "0", "--tenants", "2")
