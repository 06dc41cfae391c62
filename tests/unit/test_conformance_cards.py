"""How docs/conformance_cards.py puts servers side by side."""

import json
from pathlib import Path

import conformance_cards
import pytest


def card(file: Path, *verdicts: str) -> str:
    checks = [
        {"check": f"wire/{number}", "verdict": verdict, "detail": "no | answer" * (verdict != "passed")}
        for number, verdict in enumerate(verdicts)
    ]
    total = {verdict: verdicts.count(verdict) for verdict in ("passed", "failed", "skipped")}
    file.write_text(json.dumps({"sdk": "0.38.0", "seconds": 12.3, "total": total, "checks": checks}))
    return str(file)


def test_checks_that_a_server_does_not_pass_are_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conformance_cards, "RECORD", tmp_path / "conformance.json")
    first = card(tmp_path / "a.json", "passed", "failed", "passed", "passed")
    conformance_cards.main([f"one={first}", f"other={first}"])
    conformance_cards.main([f"other={card(tmp_path / 'b.json', 'passed', 'passed', 'skipped')}"])  # in place of it
    lines = conformance_cards.markdown().splitlines()
    assert "Checks that pass on each of them: 1. The others, with the answers:" in lines
    assert lines[-3:] == [
        "| wire/1 | **fails**: no \\| answer | passes |",
        "| wire/2 | passes | skipped: no \\| answer |",
        "| wire/3 | passes | not run |",
    ]
    assert [line.split(" | ")[0] for line in lines[2:4]] == ["| one", "| other"]
