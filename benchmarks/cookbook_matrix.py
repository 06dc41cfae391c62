"""Run every entry point of tinker-cookbook for a step or two on a server of tiny models.

    python benchmarks/cookbook_matrix.py --python COOKBOOK/bin/python [--only PART ...] [--backend BACKEND] [--list]

COOKBOOK is an environment with the cookbook: docs/how-to/use-the-cookbook.md says how to make one. Results go to the
file of `--json`, row by row. `python docs/generate.py` makes docs/reference/cookbook.md of it.
"""

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

_ROOT: Final = Path(__file__).parents[1]
sys.path.insert(0, str(_ROOT / "tests" / "hub"))  # the stand-in hub is a tool of the tests

from cookbook.entries import ENTRIES, NO_SERVER, Entry  # noqa: E402
from cookbook.served import BACKENDS, run_entry, served  # noqa: E402

_PACKAGES: Final = ("tinker-cookbook", "tinker", "tml-renderers", "datasets", "transformers")

Row = dict[str, Any]


def main(arguments: Sequence[str] | None = None) -> int:
    """Return how many entry points fail."""
    options = _parser().parse_args(arguments)
    entries = _chosen(options.only)
    if options.list:
        print("\n".join(entry.module for entry in entries))
        return 0
    rows = _read(options.json)
    with served(options.work_dir, options.python, options.backend, entries) as place:
        for number, entry in enumerate(entries):
            print(f"{number + 1} of {len(entries)}: {entry.module}", flush=True)
            row = {**run_entry(entry, place), **_about(entry)}
            rows = [*(each for each in rows if each["module"] != entry.module), row]
            _write(options.json, rows, _versions(options.python))
            print(f"  {row['outcome']} in {row['seconds']} s {row.get('said', '')}", flush=True)
    tried = {entry.module for entry in entries}
    return sum(row["outcome"] == "fails" for row in rows if row["module"] in tried)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", type=Path, required=True, help="the one of the cookbook's environment")
    parser.add_argument("--only", nargs="+", metavar="PART", help="entry points whose module contains one of these")
    parser.add_argument("--backend", choices=list(BACKENDS), default="jax")
    parser.add_argument("--list", action="store_true", help="print what would run")
    parser.add_argument("--work-dir", type=Path, default=_ROOT / ".bench" / "cookbook", help="emptied first")
    parser.add_argument("--json", type=Path, default=_ROOT / "docs/reference/cookbook.json")
    return parser


def _chosen(parts: Sequence[str] | None) -> list[Entry]:
    """Return the entry points whose module contains one of these, and those whose checkpoints they read."""
    named = [entry for entry in ENTRIES if parts is None or any(part in entry.module for part in parts)]
    before = {entry.after for entry in named}
    return [entry for entry in ENTRIES if entry in named or entry.module in before]


def _about(entry: Entry) -> Row:
    return {
        "arguments": list(entry.argument),
        "why": entry.why,
        "size": list(entry.size),
        "stand_ins": [*entry.data, *entry.stand_ins],
        "note": entry.note,
    }


def _read(file: Path) -> list[Row]:
    rows: list[Row] = json.loads(file.read_text(encoding="utf-8"))["rows"] if file.is_file() else []
    return rows


def _write(file: Path, rows: Sequence[Row], versions: dict[str, str]) -> None:
    """Write all rows, so that none is lost if the next one is interrupted."""
    order = [entry.module for entry in ENTRIES]
    kept = sorted((row for row in rows if row["module"] in order), key=lambda row: order.index(row["module"]))
    found = {
        "when": datetime.now(UTC).strftime("%Y-%m-%d"),
        "versions": versions,
        "no_server": list(NO_SERVER),
        "not_run": [module for module in order if module not in {row["module"] for row in kept}],
        "rows": kept,
    }
    part = file.with_suffix(".part")
    part.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    part.replace(file)


def _versions(python: Path) -> dict[str, str]:
    program = f"import json, importlib.metadata as m; print(json.dumps({{n: m.version(n) for n in {_PACKAGES}}}))"
    asked = subprocess.run([python, "-c", program], check=True, capture_output=True)
    found: dict[str, str] = json.loads(asked.stdout)
    return found


if __name__ == "__main__":
    sys.exit(main())
