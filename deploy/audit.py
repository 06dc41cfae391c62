"""Look for known vulnerabilities in the pinned versions: ask PyPI, or read advisories from a file.

    python deploy/audit.py constraints.txt --auditor PIP_AUDIT [--advisories PATH]

PATH is a directory or a zip file with advisories in the OSV format (https://ossf.github.io/osv-schema/), such as the
file `all.zip` that osv.dev publishes for PyPI. It is read if PyPI cannot be asked. Exits with 1 if there are
vulnerabilities, and with 2 if nobody could tell.
"""

import argparse
import json
import subprocess
import sys
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version

Pins = Mapping[str, str]
"""Versions by the name of a package."""


@dataclass(frozen=True, slots=True)
class Finding:
    package: str
    version: str
    advisory: str
    summary: str

    def __str__(self) -> str:
        return f"{self.package} {self.version}: {self.advisory}: {self.summary}"


class UnknownError(Exception):
    """Nobody could say which vulnerabilities are known."""


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("constraints", type=Path)
    parser.add_argument("--auditor", required=True, help="the program pip-audit")
    parser.add_argument("--advisories", type=Path)
    given = parser.parse_args(arguments)
    try:
        source, found = _audit(given.constraints, given.auditor, given.advisories)
    except UnknownError as error:
        print(error, file=sys.stderr)
        return 2
    print(*found, f"{len(found)} known vulnerabilities in {given.constraints}, {source}", sep="\n")
    return int(bool(found))


def _audit(constraints: Path, auditor: str, advisories: Path | None) -> tuple[str, list[Finding]]:
    try:
        return "by PyPI", asked(auditor, constraints)
    except UnknownError as error:
        if advisories is None:
            msg = (
                f"{error}\nPyPI does not tell which vulnerabilities are known; name a file or directory of advisories "
                "in the OSV format: make audit ADVISORIES=PATH"
            )
            raise UnknownError(msg) from error
    known = list(read(advisories))
    newest = max((str(each.get("modified", "")) for each in known), default="")
    if not newest:
        msg = f"{advisories} has no advisories in the OSV format"
        raise UnknownError(msg)
    source = f"by {len(known)} advisories in {advisories}, the newest of {newest[:10]}"
    return source, list(matches(pins(constraints), known))


def asked(auditor: str, constraints: Path) -> list[Finding]:
    """Ask PyPI by pip-audit. Raise UnknownError if it does not answer for every package."""
    command = [auditor, "--strict", "--no-deps", "--disable-pip", "--format", "json", "-r", str(constraints)]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    try:
        answer = json.loads(done.stdout)
    except ValueError as error:
        raise UnknownError(done.stderr.strip()) from error
    return [
        Finding(each["name"], each["version"], found["id"], _first_line(found.get("description", "")))
        for each in answer["dependencies"]
        for found in each["vulns"]
    ]


def pins(constraints: Path) -> Pins:
    """Read a file whose every line pins a version."""
    found: dict[str, str] = {}
    for line in constraints.read_text(encoding="utf-8").splitlines():
        text = line.partition("#")[0].strip()
        if text:
            requirement = Requirement(text)
            pinned = [each.version for each in requirement.specifier if each.operator == "=="]
            if len(pinned) != 1:
                msg = f"{constraints}: {text!r} does not pin one version"
                raise UnknownError(msg)
            found[canonicalize_name(requirement.name)] = pinned[0]
    return found


def read(advisories: Path) -> Iterator[Mapping[str, Any]]:
    """Yield the advisories of a directory or a zip file that have not been withdrawn."""
    for content in _contents(advisories):
        advisory = json.loads(content)
        if "withdrawn" not in advisory:
            yield advisory


def _contents(advisories: Path) -> Iterator[bytes]:
    if advisories.is_dir():
        for file in sorted(advisories.rglob("*.json")):
            yield file.read_bytes()
        return
    try:
        with zipfile.ZipFile(advisories) as archive:
            for name in archive.namelist():
                if name.endswith(".json"):
                    yield archive.read(name)
    except (OSError, zipfile.BadZipFile) as error:
        msg = f"{advisories} cannot be read: {error}"
        raise UnknownError(msg) from error


def matches(pinned: Pins, advisories: Sequence[Mapping[str, Any]]) -> Iterator[Finding]:
    """Yield a finding for each advisory about a pinned version."""
    for advisory in advisories:
        for affected in advisory.get("affected", ()):
            package = affected.get("package", {})
            name = canonicalize_name(package.get("name", ""))
            if package.get("ecosystem") == "PyPI" and name in pinned and is_affected(pinned[name], affected):
                summary = _first_line(advisory.get("summary") or advisory.get("details") or "")
                yield Finding(name, pinned[name], advisory["id"], summary)
                break


def is_affected(version: str, affected: Mapping[str, Any]) -> bool:
    """Decide as the format says. A bound that is no version of Python counts as one that does not end the range."""
    if version in affected.get("versions", ()):
        return True
    ranges = [each for each in affected.get("ranges", ()) if each.get("type") == "ECOSYSTEM"]
    return any(_is_within(Version(version), each.get("events", ())) for each in ranges)


def _is_within(version: Version, events: Sequence[Mapping[str, str]]) -> bool:
    within = False
    for kind, bound in sorted((_bound(event) for event in events), key=lambda each: each[1]):
        if kind == "introduced" and version >= bound:
            within = True
        elif (kind == "fixed" and version >= bound) or (kind == "last_affected" and version > bound):
            within = False
    return within


def _bound(event: Mapping[str, str]) -> tuple[str, Version]:
    ((kind, text),) = event.items()
    try:
        return kind, Version(text)
    except InvalidVersion:
        return ("introduced", Version("0")) if kind == "introduced" else ("unknown", Version("0"))


def _first_line(text: str) -> str:
    return text.strip().partition("\n")[0]


if __name__ == "__main__":
    sys.exit(main())
