"""Renders docs/reference/cookbook.json as the generated part of cookbook.md."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

Row = Mapping[str, Any]


def render(found: Mapping[str, Any]) -> str:
    rows = found["rows"]
    outcomes = Counter(row["outcome"] for row in rows)
    parts = [
        f"{len(rows) + len(found['not_run']) + len(found['no_server'])} modules of tinker-cookbook "
        f"{found['versions']['tinker-cookbook']} are programs, and {len(rows)} of them were run. "
        f"{outcomes['runs']} of these run unedited, {outcomes['runs with arguments']} with arguments, "
        f"{outcomes['cannot']} cannot run here"
        f"{_failing(outcomes['fails'])}. Last run: {found['when']}, with {_versions(found['versions'])}.",
        "## What runs",
        _table(("Entry point", "Result", "Arguments", "Stand-ins", "Operations submitted"), map(_line, rows)),
        "## What cannot run here",
        _table(("Entry point", "What it lacks", "In its words"), _lacking(rows)),
        *(["## What was not run yet", _modules(found["not_run"])] if found["not_run"] else []),
        "## What uses no server",
        _modules(found["no_server"]),
    ]
    return "\n\n".join(parts)


def _failing(number: int) -> str:
    return f", {number} fail" if number else ""


def _line(row: Row) -> Sequence[str]:
    result = {"runs": "runs", "runs with arguments": f"runs with arguments: {row['why']}", "cannot": "cannot"}
    shown = result.get(row["outcome"], f"**fails**: {_cell(row.get('said', ''))}")
    return (
        f"`{row['module']}`",
        f"{shown}; {row['note']}" if row["note"] else shown,
        f"`{_cell(' '.join(row['arguments']))}`" if row["arguments"] else "",
        ", ".join(row["stand_ins"]),
        ", ".join(f"{number} {kind}" for kind, number in sorted(row["submitted"].items())),
    )


def _lacking(rows: Sequence[Row]) -> Iterable[Sequence[str]]:
    for row in rows:
        if row["outcome"] == "cannot":
            yield f"`{row['module']}`", row["lacks"], f"`{_cell(row['said'])}`"


def _modules(names: Sequence[str]) -> str:
    return ", ".join(f"`{name}`" for name in names) + "."


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ").replace("`", "'")


def _versions(versions: Mapping[str, str]) -> str:
    return ", ".join(f"{package} {version}" for package, version in sorted(versions.items()))


def _table(header: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    ruled = [f"| {' | '.join(header)} |", f"|{'---|' * len(header)}"]
    return "\n".join([*ruled, *(f"| {' | '.join(line)} |" for line in lines)])
