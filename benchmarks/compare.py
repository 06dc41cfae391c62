"""Compare this tree's tinsmith with other servers of the Tinker API, scenario by scenario, in alternating rounds.

    python benchmarks/compare.py [--peer "skyrl CHECKOUT --python PYTHON"] [--sdk DIRECTORY] [--short] [--only NAME ...]

A peer is the name of a script `benchmarks/comparison/start_NAME.py` with its options; `running --url URL --base-model
NAME` takes a server that runs already. Figures go to the file of `--json`, and docs/reference/comparison.md shows them
after `python docs/generate.py`. A round that other processes disturbed is thrown away, unless `--allow-load`.
"""

import argparse
import json
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

from comparison import page
from comparison.proc import machine
from comparison.rounds import DISTURBED_CORES, Effort, Result, measure
from comparison.scenarios import SCENARIOS, TENANTS
from comparison.servers import Server, Setup
from comparison.shapes import SHAPES

from tinsmith.loopback import exempt_loopback
from tinsmith_checkpoints.huggingface.tiny_model import write_tiny_model

_ROOT: Final = Path(__file__).parents[1]
_RANK: Final = 8
_SETTLE_S: Final = 600.0
_FULL: Final = Effort(rounds=5, fewest=3, limit_s=30.0)
_SHORT: Final = Effort(rounds=3, fewest=2, limit_s=8.0)
_MAIN: Final = (
    "start",
    "sft",
    "sft-varied",
    "sample",
    "sample-lone",
    "sample-short",
    "rl",
    "weight-sync",
    "logprobs",
    "optim-step",
)
# Of a further model. A peer that compiles for each new size would take many minutes for the others.
_FURTHER: Final = ("start", "sft", "sample", "sample-lone", "weight-sync", "logprobs", "optim-step")


def main() -> int:
    exempt_loopback(os.environ)
    options = _parser().parse_args()
    scripts = [["tinsmith", "--backend", options.backend], *(shlex.split(peer) for peer in options.peer)]
    found: dict[str, Any] = {
        "when": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "commit": _commit(),
        "machine": machine(),
        "method": {"most_cores_of_others": DISTURBED_CORES, "load_was_allowed": options.allow_load, "rank": _RANK},
        "models": [],
    }
    for number, name in enumerate(options.models.split(",")):
        first = _MAIN if options.short else tuple(SCENARIOS)
        chosen = options.only or list(_FURTHER if number else first)
        found["models"].append(_measure_model(name, scripts, chosen, options))
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(found, indent=1) + "\n")  # after each model, so that none is lost
    print(f"\nwrote {options.json}\n\n{page.render(found)}")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer", action="append", default=[], metavar="SCRIPT", help="may be repeated")
    parser.add_argument("--sdk", type=Path, help="directory with the Tinker SDK that all clients use")
    parser.add_argument("--models", default="tiny,small", help=f"of {', '.join(SHAPES)}; default tiny,small")
    parser.add_argument("--only", nargs="+", choices=list(SCENARIOS), metavar="NAME", help=", ".join(SCENARIOS))
    parser.add_argument(
        "--short",
        action="store_true",
        help="the main scenarios alone, in fewer rounds; of a further model, there are fewer in any case",
    )
    parser.add_argument("--rounds", type=int, help="of each scenario")
    parser.add_argument("--allow-load", action="store_true", help="keep disturbed rounds; the page says so")
    parser.add_argument("--backend", default="jax", help="of tinsmith")
    parser.add_argument("--work-dir", type=Path, default=_ROOT / ".bench", help="models, data and caches")
    parser.add_argument("--json", type=Path, default=_ROOT / "docs/reference/comparison.json")
    return parser


def _measure_model(
    name: str, scripts: Sequence[Sequence[str]], chosen: Sequence[str], options: argparse.Namespace
) -> dict[str, Any]:
    work_dir = options.work_dir.resolve() / name
    model = work_dir / "model"
    parameters = write_tiny_model(model, SHAPES[name], overwrite=True)
    setup = Setup(
        model=model,
        vocab_size=SHAPES[name].vocab_size,
        work_dir=work_dir,
        max_models=TENANTS,
        rank=_RANK,
        sdk=options.sdk.resolve() if options.sdk else None,
    )
    effort = _SHORT if options.short else _FULL
    if options.rounds:
        effort = Effort(rounds=options.rounds, fewest=1, limit_s=effort.limit_s)
    results, started = [], time.monotonic()
    with ExitStack() as stack:
        servers: list[Server] = []
        rows = []
        for script in scripts:
            server = stack.enter_context(Server.started(script, setup))
            result, row = _start(server)
            servers.append(server)
            rows.append(row)
            results.append(result)
        figures = [_merged(results)] if "start" in chosen else []
        for scenario in chosen:
            if scenario != "start":
                figures.append(measure(scenario, servers, effort, allow_load=options.allow_load))
                _tell(name, figures[-1], time.monotonic() - started)
        for server, row in zip(servers, rows, strict=True):
            row.update(sdk=server.sdk, peak_mib=server.peak_mib)
    return {
        "model": name,
        "parameters": parameters,
        "seconds": time.monotonic() - started,
        "servers": rows,
        "figures": [each.as_json() for each in figures],
    }


def _start(server: Server) -> tuple[Result, dict[str, Any]]:
    """Take the first step at once, as a user would, then wait until nothing compiles any more."""
    result = measure("start", [server], Effort(rounds=1, fewest=1, limit_s=0), allow_load=True)
    result.values = {name: [server.ready_s + value for value in values] for name, values in result.values.items()}
    settled_s = server.settle(_SETTLE_S)
    row = {
        "name": server.name,
        "version": server.version,
        "configuration": server.configuration,
        "cache_was_warm": server.cache_was_warm,
        "settled_s": settled_s,
        "start_cpu_s": server.cpu_s(),
    }
    print(f"{server.name}: settled after {settled_s:.0f} s and {row['start_cpu_s']:.0f} CPU seconds", flush=True)
    return result, row


def _merged(results: Sequence[Result]) -> Result:
    """Return one result for all servers, which were started one after another."""
    first, *others = results
    for other in others:
        first.values.update(other.values)
        first.server_cpu_s.update(other.server_cpu_s)
        first.errors.update(other.errors)
    return first


def _tell(model: str, result: Result, elapsed_s: float) -> None:
    medians = {name: f"{page.median(values):.4g}" for name, values in result.values.items()}
    thrown = f", {result.thrown_away} rounds thrown away" if result.thrown_away else ""
    print(
        f"{elapsed_s:4.0f} s {model} {result.scenario}: {medians} {result.unit}{thrown} {result.errors or ''}",
        flush=True,
    )


def _commit() -> str:
    command = ["git", "-C", str(_ROOT), "rev-parse", "--short=9", "HEAD"]
    return subprocess.run(command, check=False, capture_output=True, text=True).stdout.strip() or "unknown"


if __name__ == "__main__":
    sys.exit(main())
