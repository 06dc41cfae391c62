"""Put cards of `tinsmith-conformance --json` side by side on its page.

    python docs/conformance_cards.py NAME=CARD[,CARD...] ...

NAME says which server the cards score, with its version and what differs from its defaults. A run can be in parts, with
`--only`: of a check that several cards have, the last one counts. A name that is there already is replaced. The
verdicts go into reference/conformance.json, which generate.py makes the table of.
"""

import json
import sys
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

RECORD = Path(__file__).parent / "reference" / "conformance.json"
DETAIL = 160  # characters of what a server said
_SIGNS = {"passed": "passes", "failed": "**fails**", "skipped": "skipped"}


def main(arguments: Sequence[str]) -> None:
    cards = _read()
    for argument in arguments:
        name, _, files = argument.partition("=")
        cards[name] = _joined([Path(file) for file in files.split(",")])
    RECORD.write_text(json.dumps(cards, indent=1) + "\n", encoding="utf-8")


def markdown() -> str:
    """Return how each server stands: in sum, and in each check in which one of them does not pass."""
    cards = _read()
    columns = list(cards)
    sums = [
        [
            name,
            card["when"],
            f"SDK {card['sdk']}",
            f"{card['seconds']:.0f} s",
            *(str(card["total"][key]) for key in _SIGNS),
        ]
        for name, card in cards.items()
    ]
    checks = list(dict.fromkeys(check for card in cards.values() for check in card["checks"]))
    wanting = [check for check in checks if any(_verdict(card, check) != "passed" for card in cards.values())]
    lines = [[check, *(_shown(card, check) for card in cards.values())] for check in wanting]
    return "\n\n".join(
        [
            _table(("Server", "When", "With", "Time", *_SIGNS), sums),
            f"Checks that pass on each of them: {len(checks) - len(wanting)}. The others, with the answers:",
            _table(("Check", *columns), lines),
        ]
    )


def _joined(files: Sequence[Path]) -> dict[str, Any]:
    cards = [json.loads(file.read_text(encoding="utf-8")) for file in files]
    checks = {each["check"]: [each["verdict"], _said(each, card)] for card in cards for each in card["checks"]}
    verdicts = [verdict for verdict, _ in checks.values()]
    return {
        "when": datetime.fromtimestamp(files[-1].stat().st_mtime, UTC).strftime("%Y-%m-%d"),
        "sdk": cards[-1]["sdk"],
        "seconds": sum(card["seconds"] for card in cards),
        "total": {verdict: verdicts.count(verdict) for verdict in _SIGNS},
        "checks": checks,
    }


def _said(check: Mapping[str, Any], card: Mapping[str, Any]) -> str:
    """Return what the server said, without names of the machine that it ran on."""
    detail: str = check["detail"].replace(card["model"], "MODEL").replace(card["url"], "URL")
    return detail[:DETAIL]


def _read() -> dict[str, Any]:
    cards: dict[str, Any] = json.loads(RECORD.read_text(encoding="utf-8")) if RECORD.is_file() else {}
    return cards


def _verdict(card: Mapping[str, Any], check: str) -> str:
    return str(card["checks"].get(check, ["not there"])[0])


def _shown(card: Mapping[str, Any], check: str) -> str:
    verdict = _verdict(card, check)
    if verdict == "passed":
        return _SIGNS[verdict]
    if verdict not in _SIGNS:
        return "not run"
    detail = card["checks"][check][1].replace("|", "\\|").replace("\n", " ").replace("`", "'").replace("<", "&lt;")
    return f"{_SIGNS[verdict]}: {detail}"


def _table(header: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    ruled = [f"| {' | '.join(header)} |", f"|{'---|' * len(header)}"]
    return "\n".join([*ruled, *(f"| {' | '.join(line)} |" for line in lines)])


if __name__ == "__main__":
    main(sys.argv[1:])
