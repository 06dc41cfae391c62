"""`make dist`: builds wheels and source distributions of tinsmith, its libraries, plugins and tools into dist/.

    python deploy/make_dist.py [--into dist] [--url https://example.org/team/tinsmith]

A tag `v1.2.3` on the commit gives the version; without one it is that of pyproject.toml. Links of a README that lead
into the repository become links to `URL/blob/TAG/...`; without a URL only their text stays: they would lead nowhere.
"""

import argparse
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from posixpath import join, normpath
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[1]
DISTRIBUTIONS: Final = (".", *(str(each.parent.relative_to(ROOT)) for each in sorted(ROOT.glob("*/*/pyproject.toml"))))
_VERSION: Final = re.compile(r'^version = "(.+)"$', re.MULTILINE)
_LINK: Final = re.compile(r"\[([^\]]+)\]\((?!https?://|#)([^)\s]+)\)")
_OF_CORE: Final = ("core", "examples", "CHANGELOG.md", "constraints.txt")
_NOT_COPIED: Final = shutil.ignore_patterns("__pycache__", "*.pyc", "tests")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--into", type=Path, default=ROOT / "dist", help="replaced if it is there")
    parser.add_argument("--url", help="where the repository can be read")
    options = parser.parse_args()
    version = tagged_version() or _VERSION.findall((ROOT / "pyproject.toml").read_text())[0]
    shutil.rmtree(options.into, ignore_errors=True)
    with tempfile.TemporaryDirectory() as staged:
        for place in DISTRIBUTIONS:
            stage(place, Path(staged) / place, version, options.url)
            build(Path(staged) / place, options.into)
    for file in sorted(options.into.iterdir()):
        sys.stdout.write(f"{file}\n")


def tagged_version() -> str | None:
    """Return the version that the commit's tag states; None if it has no such tag, or there is no repository."""
    command = ["git", "-C", str(ROOT), "tag", "--points-at", "HEAD", "--list", "v[0-9]*"]
    told = subprocess.run(command, capture_output=True, text=True, check=False).stdout.split()
    if len(told) > 1:
        raise SystemExit(f"the commit has several versions: {', '.join(told)}; keep one of these tags")
    return told[0].removeprefix("v") if told else None


def stage(place: str, target: Path, version: str, url: str | None) -> None:
    """Copy what a distribution is built from, with its version and with links that work outside the repository."""
    source = ROOT / place
    pyproject = (source / "pyproject.toml").read_text()
    target.mkdir(parents=True, exist_ok=True)
    package = [each.parent.name for each in source.glob("*/__init__.py")]
    for part in (*(_OF_CORE if place == "." else package), "LICENSE"):
        if (source / part).is_dir():
            shutil.copytree(source / part, target / part, ignore=_NOT_COPIED)
        else:
            shutil.copyfile(source / part, target / part)
    (target / "README.md").write_text(relinked((source / "README.md").read_text(), place, version, url))
    urls = f'\n[project.urls]\nHomepage = "{url}"\nChangelog = "{url}/blob/v{version}/CHANGELOG.md"\n' if url else ""
    (target / "pyproject.toml").write_text(_VERSION.sub(f'version = "{version}"', pyproject, count=1) + urls)


def relinked(markdown: str, place: str, version: str, url: str | None) -> str:
    """Return a README whose links into the repository are absolute or, without a URL, text."""

    def replace(match: re.Match[str]) -> str:
        text, target = match.groups()
        return text if url is None else f"[{text}]({url}/blob/v{version}/{normpath(join(place, target))})"

    return _LINK.sub(replace, markdown)


def build(source: Path, into: Path) -> None:
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(into), str(source)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stdout}{done.stderr}")


if __name__ == "__main__":
    main()
