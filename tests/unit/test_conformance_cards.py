"""How docs/conformance_cards.py puts servers side by side."""

import json
from pathlib import Path

import conformance_cards
import pytest


def card(file: Path, *verdicts: str, first: int = 0) -> str:
    checks = [
        {"check": f"wire/{number}", "verdict": verdict, "detail": "no | answer of /models/tiny" * (verdict != "passed")}
        for number, verdict in enumerate(verdicts, first)
    ]
    file.write_text(
        json.dumps({"url": "http://h", "model": "/models/tiny", "sdk": "0.38.0", "seconds": 12.3, "checks": checks})
    )
    return str(file)


def test_checks_that_a_server_does_not_pass_are_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conformance_cards, "RECORD", tmp_path / "conformance.json")
    first = card(tmp_path / "a.json", "passed", "failed", "passed", "passed")
    conformance_cards.main([f"one={first}", f"other={first}"])
    conformance_cards.main([f"other={card(tmp_path / 'b.json', 'passed', 'passed', 'skipped')}"])  # in place of it
    lines = conformance_cards.markdown().splitlines()
    assert "Checks that pass on each of them: 1. The others, with the answers:" in lines
    assert lines[-3:] == [
        "| wire/1 | **fails**: no \\| answer of MODEL | passes |",
        "| wire/2 | passes | skipped: no \\| answer of MODEL |",
        "| wire/3 | passes | not run |",
    ]
    assert [line.split(" | ")[0] for line in lines[2:4]] == ["| one", "| other"]


def test_a_run_in_parts_is_one_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conformance_cards, "RECORD", tmp_path / "conformance.json")
    first = card(tmp_path / "a.json", "passed", "failed", "failed")
    second = card(tmp_path / "b.json", "passed", "skipped", first=2)
    conformance_cards.main([f"one={first},{second}"])
    found = json.loads((tmp_path / "conformance.json").read_text())["one"]
    assert found["total"] == {"passed": 2, "failed": 1, "skipped": 1}
    assert (found["seconds"], [verdict for verdict, _ in found["checks"].values()]) == (
        24.6,
        ["passed", "failed", "passed", "skipped"],
    )
