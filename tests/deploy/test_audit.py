"""`make audit` without a network: advisories from a file are matched with the pinned versions as the format says."""

import json
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest

DEPLOY = Path(__file__).parents[2] / "deploy"
CONSTRAINTS = Path(__file__).parents[2] / "constraints.txt"
SILENT = "false"  # for an auditor without a network: it prints no report


@pytest.fixture
def audit(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(DEPLOY))
    import audit

    return audit


def advisory(name: str = "demo", *, name_of_advisory: str = "PYSEC-1", **affected: Any) -> dict[str, Any]:
    package = {"package": {"ecosystem": "PyPI", "name": name}, **affected}
    return {"id": name_of_advisory, "modified": "2026-11-01T00:00:00Z", "summary": "it leaks", "affected": [package]}


def between(*events: dict[str, str]) -> dict[str, Any]:
    return {"ranges": [{"type": "ECOSYSTEM", "events": list(events)}]}


@pytest.mark.parametrize(
    ("version", "affected", "is_affected"),
    [
        ("1.2", {"versions": ["1.1", "1.2"]}, True),
        ("1.3", {"versions": ["1.1", "1.2"]}, False),
        ("1.2", between({"introduced": "0"}, {"fixed": "1.3"}), True),
        ("1.3", between({"introduced": "0"}, {"fixed": "1.3"}), False),
        ("1.10", between({"introduced": "1.9"}, {"fixed": "1.11"}), True),  # versions, not texts
        ("1.0", between({"introduced": "1.1"}), False),
        ("2.0", between({"introduced": "1.1"}, {"last_affected": "2.0"}), True),
        ("2.0.1", between({"introduced": "1.1"}, {"last_affected": "2.0"}), False),
        ("3.0", between({"introduced": "0"}, {"fixed": "1"}, {"introduced": "2.9"}, {"fixed": "3.1"}), True),
        ("1.5", between({"fixed": "1"}, {"introduced": "0"}), False),  # in any order
        ("9.0", between({"introduced": "0"}, {"fixed": "not a version"}), True),
        ("1.0", {"ranges": [{"type": "GIT", "events": [{"introduced": "0"}]}]}, False),
    ],
)
def test_ranges(audit: Any, version: str, affected: dict[str, Any], is_affected: bool) -> None:
    assert audit.is_affected(version, affected) is is_affected


def test_findings_from_a_directory_and_from_a_zip_file(
    audit: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "constraints.txt").write_text("# pins\nDemo_Package==1.0\nother==2.0  # as it is\n")
    advisories = [
        advisory("demo-package", versions=["1.0"]),
        {**advisory("other", name_of_advisory="PYSEC-2", versions=["2.0"]), "withdrawn": "2026-01-01T00:00:00Z"},
        advisory("other", name_of_advisory="PYSEC-3", versions=["1.0"]),
        advisory("absent", name_of_advisory="PYSEC-4", versions=["2.0"]),
    ]
    (tmp_path / "advisories" / "PyPI").mkdir(parents=True)
    with zipfile.ZipFile(tmp_path / "all.zip", "w") as archive:
        for each in advisories:
            (tmp_path / "advisories" / "PyPI" / f"{each['id']}.json").write_text(json.dumps(each))
            archive.writestr(f"{each['id']}.json", json.dumps(each))
    for source in ("advisories", "all.zip"):
        arguments = [str(tmp_path / "constraints.txt"), "--auditor", SILENT, "--advisories", str(tmp_path / source)]
        assert audit.main(arguments) == 1
        first, last = capsys.readouterr().out.splitlines()
        assert first == "demo-package 1.0: PYSEC-1: it leaks"
        assert "1 known vulnerabilities" in last
        assert f"by 3 advisories in {tmp_path / source}, the newest of 2026-11-01" in last


@pytest.mark.parametrize("content", [None, "empty", "broken"])
def test_nobody_to_ask_is_a_failure(
    audit: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str], content: str | None
) -> None:
    source = tmp_path / "all.zip"
    if content == "empty":
        zipfile.ZipFile(source, "w").close()
    elif content == "broken":
        source.write_text("no archive")
    given = [] if content is None else ["--advisories", str(source)]
    assert audit.main([str(CONSTRAINTS), "--auditor", SILENT, *given]) == 2
    assert ("make audit ADVISORIES=PATH" if content is None else str(source)) in capsys.readouterr().err


def test_what_pypi_says_is_passed_on(audit: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """By a program that prints a report as pip-audit does."""
    report = {
        "dependencies": [{"name": "demo", "version": "1.0", "vulns": [{"id": "PYSEC-1", "description": "it\nx"}]}]
    }
    auditor = tmp_path / "auditor"
    auditor.write_text(f"#!{sys.executable}\nprint({json.dumps(report)!r})\nraise SystemExit(1)\n")
    auditor.chmod(0o755)
    assert audit.main([str(CONSTRAINTS), "--auditor", str(auditor)]) == 1
    assert capsys.readouterr().out.startswith("demo 1.0: PYSEC-1: it\n1 known vulnerabilities")


def test_every_line_of_the_constraints_can_be_judged(audit: Any) -> None:
    assert len(audit.pins(CONSTRAINTS)) > 100
