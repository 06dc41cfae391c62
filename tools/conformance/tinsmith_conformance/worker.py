"""The child process that runs checks: `python -m tinsmith_conformance.worker`.

It reads lines from standard input: first the target, then names of checks. It says that it is ready, and answers each
name with a line of JSON. The SDK's prints go nowhere.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Final, TextIO

from tinsmith_conformance.checks import CHECKS, warm_up
from tinsmith_conformance.tester import Target, Tester
from tinsmith_conformance.verdicts import CheckError, Outcome, SkippedError, Verdict

WARM_UP: Final = "warm-up"
_SHOWN_CHARS: Final = 1000


def main() -> None:
    answers = _private_output()
    target = Target(**json.loads(sys.stdin.readline()))
    checks = {each.name: each for each in CHECKS}
    answers.write("ready\n")
    answers.flush()
    for line in sys.stdin:
        check = checks.get(line.strip())
        outcome = outcome_of(warm_up if check is None else check.run, target)
        answers.write(json.dumps(asdict(outcome)) + "\n")
        answers.flush()
    os._exit(0)  # threads of the SDK may wait for a server that does not answer


def _private_output() -> TextIO:
    """Return what standard output was, and let all others write into nothing."""
    own = os.fdopen(os.dup(1), "w", encoding="utf-8")
    nothing = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nothing, 1)
    os.dup2(nothing, 2)
    return own


def outcome_of(run: Callable[[Tester], None], target: Target) -> Outcome:
    """Run a check in this process, without a limit in time."""
    began = time.monotonic()
    verdict, detail = Verdict.PASSED, ""
    try:
        with Tester(target) as tester:
            run(tester)
    except SkippedError as reason:
        verdict, detail = Verdict.SKIPPED, str(reason)
    except CheckError as error:
        verdict, detail = Verdict.FAILED, str(error)
    except Exception as error:  # noqa: BLE001 - an unexpected answer may raise anything
        verdict, detail = Verdict.FAILED, f"{type(error).__name__}: {error}"
    return Outcome(verdict=verdict, detail=detail[:_SHOWN_CHARS], seconds=time.monotonic() - began)


if __name__ == "__main__":
    main()
