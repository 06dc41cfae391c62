"""Try every release of the SDK that is served, and write the page's table: `python docs/sdk_versions.py`.

For each release in tests/e2e/sdk_releases.txt, it runs tests/e2e/sdk_scenario.py against one server, compares the
numbers with the newest release's, and walks the release's types. The results go into reference/sdk-versions.json, which
generate.py makes the table of.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parent
ROOT = DOCS.parent
RECORD = DOCS / "reference" / "sdk-versions.json"
SCENARIO = ROOT / "tests" / "e2e" / "sdk_scenario.py"
RELEASES = ROOT / "tests" / "e2e" / "sdk_releases.txt"
OF_EACH_RUN = ("sdk", "run_id")


def releases(*, in_short: bool = False) -> tuple[str, ...]:
    """Return the older releases, as the file lists them; `in_short`: those that `make test` tries."""
    lines = [line.split() for line in RELEASES.read_text().splitlines()]
    return tuple(release for release, *when in lines if when or not in_short)


def place(release: str) -> Path:
    """Return where `make` installs a release; ahead on the path, it hides the newest."""
    return Path(sys.prefix) / f"sdk-{release}"


def run(arguments: Sequence[str], sdk: Path | None, **variables: str) -> str:
    """Run Python with this SDK, None: the newest. Return what it prints."""
    if sdk is not None:
        assert sdk.is_dir(), f"this SDK is not in {sdk}; run `make setup`, or for all releases `make sdks`"
        variables["PYTHONPATH"] = str(sdk)
    environment = {**os.environ, **variables}
    done = subprocess.run(
        [sys.executable, *arguments], env=environment, capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def scenario(url: str, sdk: Path | None) -> tuple[str, dict[str, Any]]:
    """Return the release, and the numbers that it sees."""
    seen: dict[str, Any] = json.loads(run([str(SCENARIO), url], sdk).splitlines()[-1])
    return seen["sdk"], {key: value for key, value in seen.items() if key not in OF_EACH_RUN}


def main() -> None:
    from tinsmith.testing.harness import running_server

    places = [*map(place, releases()), None]
    walked = [json.loads(run([str(DOCS / "sdk_walk.py")], sdk)) for sdk in places]
    with tempfile.TemporaryDirectory() as directory, running_server(Path(directory)) as server:
        seen = [scenario(server.url, sdk) for sdk in places]
    rows = []
    for number, (now, (release, numbers)) in enumerate(zip(walked, seen, strict=True)):
        before = walked[number - 1] if number else now
        rows.append({"sdk": release, "same_numbers": numbers == seen[-1][1], **_difference(before, now)})
    newest = {key: walked[-1][key] for key in ("methods", "losses")}
    RECORD.write_text(json.dumps({"releases": rows, "newest": newest}, indent=1) + "\n")


def _difference(before: dict[str, Any], now: dict[str, Any]) -> dict[str, list[str]]:
    def names(walked: dict[str, Any]) -> set[str]:
        own = {f"{message}: {field}" for message, fields in walked["fields"].items() for field in fields}
        return own | set(walked["fields"]) | set(walked["methods"]) | {f"loss {each}" for each in walked["losses"]}

    return {"new": sorted(names(now) - names(before)), "gone": sorted(names(before) - names(now))}


def markdown() -> str:
    """Return the table. Of a new message or method, its fields and parameters are not shown."""
    lines = ["| SDK | The scenario | New since the release above | Gone |", "|---|---|---|---|"]
    for row in json.loads(RECORD.read_text())["releases"]:
        result = "the same numbers" if row["same_numbers"] else "**other numbers**"
        lines.append(f"| {row['sdk']} | {result} | {_shown(row['new'])} | {_shown(row['gone'])} |")
    return "\n".join(lines)


def _shown(names: Sequence[str]) -> str:
    """Leave out fields and parameters of types and methods that are named themselves."""
    kept = [name for name in names if re.split(r": |\(", name)[0] == name or re.split(r": |\(", name)[0] not in names]
    return ", ".join(f"`{name}`" for name in kept) or "-"


if __name__ == "__main__":
    main()
