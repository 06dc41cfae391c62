"""What a run was measured on, and the runs that docs/reference/gpu.md shows."""

import json
import platform
import subprocess
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[2]
RUNS: Final = ROOT / "docs" / "reference" / "gpu.json"
PACKAGES: Final = ("torch", "jax", "transformers", "megatron-core", "peft", "vllm", "skyrl", "flax")


def this_run() -> dict[str, object]:
    """Describe this machine and this moment. What is not known is None."""
    shown = _output("nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader")
    name, memory, driver = shown.splitlines()[0].split(", ") if shown else (None, None, None)
    return {
        "when": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "commit": _output("git", "-C", str(ROOT), "rev-parse", "--short=9", "HEAD"),
        "card": name,
        "memory": memory,
        "driver": driver,
        "versions": {"python": platform.python_version(), **_versions(PACKAGES)},
    }


def publish(reports: Sequence[Path]) -> None:
    """Add a run, whose parts may be in several reports, to those that the documentation shows, the newest first.

    Its commit is this one, if it knew none.
    """
    found = [json.loads(report.read_text(encoding="utf-8")) for report in reports]
    run = found[0]["run"]
    run["commit"] = run["commit"] or this_run()["commit"]
    parts = {part: figures for report in found for part, figures in report.items() if part != "run"}
    runs = json.loads(RUNS.read_text(encoding="utf-8")) if RUNS.is_file() else []
    runs = [{**run, "notes": [], "parts": parts}, *runs]
    RUNS.write_text(json.dumps(runs, indent=1) + "\n", encoding="utf-8")
    print(f"{RUNS} has {len(runs)} runs; add notes for who measures next; docs/generate.py shows it", file=sys.stderr)


def _versions(packages: Sequence[str]) -> dict[str, str]:
    found = {}
    for package in packages:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


def _output(*command: str) -> str | None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return None
    return done.stdout.strip() or None if done.returncode == 0 else None
