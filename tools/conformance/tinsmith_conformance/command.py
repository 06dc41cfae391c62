"""`tinsmith-conformance --url URL --model NAME`."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import tinker
from rich.console import Console

from tinsmith_conformance.checks import CHECKS
from tinsmith_conformance.loopback import exempt_loopback
from tinsmith_conformance.registry import selected
from tinsmith_conformance.report import Card, Terminal, listing, table
from tinsmith_conformance.runner import LIMIT_S, Runner
from tinsmith_conformance.tester import Target
from tinsmith_conformance.verdicts import Verdict

_KEY: Final = "tml-conformance-a"
_OTHER_KEY: Final = "tml-conformance-b"
_INTERRUPTED: Final = 130


def main(arguments: Sequence[str] | None = None, program: str = "tinsmith-conformance") -> None:
    exempt_loopback(os.environ)
    sys.exit(run(_parser(program).parse_args(arguments)))


def run(options: argparse.Namespace) -> int:
    """Return the exit code: 0 if no check failed, 1 if one did, 2 for a mistake in the options."""
    console = Console(emoji=False)
    try:
        checks = selected(CHECKS, options.only)
    except ValueError as error:
        console.print(str(error), markup=False)
        return 2
    if options.list:
        console.print(listing(checks))
        return 0
    if options.url is None or options.model is None:
        console.print("--url and --model say what to test")
        return 2
    target = Target(url=options.url, model=options.model, key=options.key, other_key=options.other_key)
    card, terminal, began, interrupted = Card(), Terminal(console, len(checks)), time.monotonic(), False
    with terminal.progress:
        try:
            for check, outcome in Runner(target, options.limit).outcomes(checks):
                card.outcomes[check] = outcome
                terminal.show(check, outcome)
        except KeyboardInterrupt:
            interrupted = True
    console.print(table(card))
    seconds = time.monotonic() - began
    console.print(f"{len(card.outcomes)} of {len(checks)} checks in {seconds:.0f} s")
    if options.json is not None:
        about = {"url": target.url, "model": target.model, "sdk": tinker.__version__, "seconds": round(seconds, 1)}
        options.json.write_text(card.as_json(**about), encoding="utf-8")
    if interrupted:
        return _INTERRUPTED
    return int(card.count(Verdict.FAILED) > 0)


def _parser(program: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(program, description="Score a server of the Tinker API.")
    parser.add_argument("--url", help="of the server, such as http://127.0.0.1:8000")
    parser.add_argument("--model", help="name of a base model that it trains and samples")
    parser.add_argument("--key", default=_KEY, help=f"API key, by default {_KEY}")
    parser.add_argument(
        "--other-key", default=_OTHER_KEY, help=f"API key of somebody else, for isolation; by default {_OTHER_KEY}"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all outcomes to this file")
    parser.add_argument(
        "--only", action="append", default=[], metavar="GROUP[/NUMBER]", help="run these alone; may be repeated"
    )
    parser.add_argument("--list", action="store_true", help="show all checks and run none")
    parser.add_argument("--limit", type=float, default=LIMIT_S, metavar="SECONDS", help="of each check; by default 60")
    return parser


if __name__ == "__main__":
    main()
