"""The program that tries models on real servers, and what it found: docs/reference/models.json."""

import json
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import model_matrix
import pytest
from matrix import page
from matrix.names import COOKBOOK, FURTHER, Name
from matrix.served import run_row

RECORD = Path(__file__).parents[2] / "docs" / "reference" / "models.json"
FOUND = json.loads(RECORD.read_text(encoding="utf-8"))
TOY = Name(name="maker/Toy", class_name="toy")
NOBODYS = Name(name="maker/Nobody's", class_name="", note="as told")


def test_a_row_is_run_once_and_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_matrix, "COOKBOOK", (TOY, NOBODYS))
    monkeypatch.setattr(model_matrix, "FURTHER", (Name(name="another Toy", class_name="toy"),))
    file = tmp_path / "models.json"
    arguments = ["--pairs", "toy+toy", "--json", str(file), "--work-dir", str(tmp_path / "work")]
    assert model_matrix.main(arguments) == 0
    found = json.loads(file.read_text())
    (row,) = found["rows"]  # which both names share
    assert row["outcome"] == "passes", row
    assert row["losses"][1] < row["losses"][0]
    assert row["targets"] == {"attn": "yes", "mlp": "yes", "unembed": "yes"}
    assert (row["isolation"], row["gate"]["verdict"]) == (0.0, "consistent")
    monkeypatch.setattr(model_matrix, "run_row", None)  # which is not called again
    assert model_matrix.main(arguments) == 0
    text = page.render(found)
    assert "Of the 2 names in the table of tinker-cookbook 0.6.1, 1 have a trainer and a sampler." in text
    assert "| maker/Toy | toy | toy | toy | attn, mlp, unembed | toy+toy |  | 512 of 1024 | exact | 0 |" in text
    assert "| maker/Nobody's | , as told | **none**: its class is not known here |" in text


@pytest.mark.thorough
def test_a_class_that_a_backend_does_not_read_is_refused_in_its_words(tmp_path: Path) -> None:
    row = run_row("NobodysForCausalLM", {}, "jax+jax", tmp_path)
    assert (row["outcome"], row["stage"]) == ("refused", "start")
    assert "architecture 'NobodysForCausalLM' is not supported, only Gemma2ForCausalLM, " in row["text"]


def test_the_page_is_about_the_names_that_the_program_tries() -> None:
    for part, names in (("cookbook", COOKBOOK), ("further", FURTHER)):
        named = [asdict(each) for each in names]
        assert [{**each, "class_name": each["class"]} for each in FOUND[part]] == [
            {**each, "class": each["class_name"]} for each in named
        ]
    assert len({each.name for each in COOKBOOK}) == 46


def test_no_row_fails_after_its_model_was_created() -> None:
    assert [row for row in FOUND["rows"] if row["outcome"] not in {"passes", "refused"}] == []


@pytest.mark.thorough
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("row", FOUND["rows"], ids=lambda row: f"{row['class']} {row['pair']} {row['settings']}"[:80])
def test_every_row_is_found_again(row: dict[str, Any], tmp_path: Path) -> None:
    for part in row["pair"].split("+"):
        if find_spec(f"tinsmith_{part}") is None:
            pytest.skip(f"tinsmith-{part} is not installed")
    found = run_row(row["class"], row["settings"], row["pair"], tmp_path)
    same = ("outcome", "stage", "targets", "experts", "packed_tokens")
    assert {key: found.get(key) for key in same} == {key: row.get(key) for key in same}, found
