"""`python -m exactly_once [--bounds large] [--mutation NAME ...]`: check, and print each violation with its steps."""

import argparse
import sys
import time

from exactly_once.bounds import BOUNDS
from exactly_once.checker import check
from exactly_once.mutations import MUTATIONS


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m exactly_once", description=__doc__)
    parser.add_argument("--bounds", choices=["small", "large", *BOUNDS], default="small")
    parser.add_argument("--mutation", action="append", choices=sorted(MUTATIONS), default=[])
    chosen = parser.parse_args()
    broken = False
    for name, bounds in BOUNDS.items():
        if name.split(":")[0] != chosen.bounds and name != chosen.bounds:
            continue
        started = time.perf_counter()
        found = check(bounds, chosen.mutation)
        took = time.perf_counter() - started
        verdict = "holds" if found.broken is None else f"BROKEN: {found.broken}"
        print(f"{name:20} {found.states:>10,} states {found.steps:>11,} steps {took:7.1f} s  {verdict}")
        for number, step in enumerate(found.trace, start=1):
            print(f"  {number:2}. {step}")
        broken = broken or found.broken is not None
    return int(broken)


sys.exit(main())
