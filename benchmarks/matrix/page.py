"""Renders docs/reference/models.json as the generated part of models.md."""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

Row = Mapping[str, Any]
_COLUMNS: Final = (
    "Model",
    "Class",
    "Trainers",
    "Samplers",
    "LoRA",
    "All weights",
    "Experts",
    "Packed",
    "Isolation",
    "Gap",
)
_SUPPORTED: Final = re.compile(r", only (\w+, )+\w+$")
"""The list of classes with which servers end a refusal: the tables above have them."""
_UNKNOWN: Final = "its class is not known here"


def render(found: Mapping[str, Any]) -> str:
    rows = found["rows"]
    cookbook, further = ([_line(name, rows) for name in found[part]] for part in ("cookbook", "further"))
    works = sum(bool(_passing(name, rows)) for name in found["cookbook"])
    parts = [
        f"Of the {len(found['cookbook'])} names in the table of tinker-cookbook 0.6.1, {works} have a trainer and a "
        f"sampler. Last run: {found['when']}, with {_versions(rows)}.",
        "## The names of tinker-cookbook",
        _table(_COLUMNS, cookbook),
        "## Further families",
        _table(_COLUMNS, further),
        "## The pairs",
        _table(("Class", "Settings", "Pair", "Result", "Losses", "Gate", "Gap"), _pairs(rows)),
        "## What is refused",
        _table(("Class", "Pair", "Where", "In the server's words"), _refusals(rows)),
    ]
    return "\n\n".join(parts)


def _line(name: Mapping[str, Any], rows: Sequence[Row]) -> list[str]:
    passing = _passing(name, rows)
    shown = f"{name['class']}, {name['note']}" if name["note"] else name["class"]
    if not passing:
        return [name["name"], shown, f"**none**: {_missing(name, rows)}", *[""] * (len(_COLUMNS) - 3)]
    isolation, gap = (max(row[key] for row in passing) for key in ("isolation", "gap"))
    return [
        name["name"],
        shown,
        _names(sorted(row["pair"].split("+")[0] for row in passing)),
        _names(sorted(row["pair"].split("+")[1] for row in passing)),
        _names(target for row in passing for target, answer in row["targets"].items() if answer == "yes"),
        _names(row["pair"] for row in passing if row["full"] == "yes") or "no",
        str(passing[0]["experts"] or ""),
        f"{max(row['longest'] for row in passing)} of {max(row['packed_tokens'] for row in passing)}",
        "exact" if isolation == 0 else f"{isolation:.1g}",
        f"{gap:.1g}",
    ]


def _of(name: Mapping[str, Any], rows: Sequence[Row]) -> list[Row]:
    return [row for row in rows if (row["class"], row["settings"]) == (name["class"], name["settings"])]


def _passing(name: Mapping[str, Any], rows: Sequence[Row]) -> list[Row]:
    return [row for row in _of(name, rows) if row["outcome"] == "passes"]


def _missing(name: Mapping[str, Any], rows: Sequence[Row]) -> str:
    if not name["class"]:
        return _UNKNOWN
    tried = _of(name, rows)
    if not tried:
        return "not tried"
    return f"refused by {_names(row['pair'] for row in tried)}, see below"


def _pairs(rows: Sequence[Row]) -> Iterable[list[str]]:
    for row in rows:
        if row["outcome"] == "refused":
            continue
        passes = row["outcome"] == "passes"
        gate = row.get("gate", {})
        yield [
            row["class"],
            _settings(row["settings"]),
            row["pair"],
            "passes" if passes else f"**fails** at {row['stage']}: {_cell(row['text'])}",
            " to ".join(f"{loss:.0f}" for loss in row.get("losses", ())),
            f"{gate['verdict']}, {gate['max_difference']:.1g}" if gate else "",
            f"{row['gap']:.1g}" if "gap" in row else "",
        ]


def _refusals(rows: Sequence[Row]) -> Iterable[list[str]]:
    """Yield each refusal once, whatever the settings."""
    seen = set()
    for row in rows:
        asked = [(row["stage"], row["text"])] if row["outcome"] == "refused" else []
        if row["outcome"] == "passes":
            answers = {**{f"train_{target} alone": row["targets"][target] for target in row["targets"]}}
            asked = [(what, text) for what, text in {**answers, "all weights": row["full"]}.items() if text != "yes"]
        for where, text in asked:
            line = (row["class"], row["pair"], where, _cell(_SUPPORTED.sub("", text)))
            if line not in seen:
                seen.add(line)
                yield list(line)


def _settings(settings: Mapping[str, Any]) -> str:
    """Return them in short: of nested ones, the kind."""
    parts = []
    for key, value in settings.items():
        shown = value.get("rope_type", "...") if isinstance(value, Mapping) else json.dumps(value)
        parts.append(f"{key}: {shown}")
    return ", ".join(parts)


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def _names(names: Iterable[str]) -> str:
    return ", ".join(dict.fromkeys(names))


def _versions(rows: Sequence[Row]) -> str:
    """Return the versions of all runs: a row that was not run again keeps its own."""
    found: dict[str, set[str]] = {}
    for row in rows:
        for package, version in row["versions"].items():
            found.setdefault(package, set()).add(version)
    return ", ".join(f"{package} {' and '.join(sorted(each))}" for package, each in sorted(found.items()))


def _table(header: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    ruled = [f"| {' | '.join(header)} |", f"|{'---|' * len(header)}"]
    return "\n".join([*ruled, *(f"| {' | '.join(line)} |" for line in lines)])
