"""Checks the installed packages against the requirements of tinsmith and its plugins."""

from __future__ import annotations

import platform
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, metadata, requires, version

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from tinsmith.commands.doctor.finding import Finding
from tinsmith.plugins.loading import Plugins


def check_installation(plugins: Plugins) -> Iterator[Finding]:
    yield _python()
    broken = [row for row in plugins.report() if row.error]
    distributions = sorted({row.distribution for row in plugins.report() if row.distribution != "(this process)"})
    for distribution in distributions:
        yield from _packages(distribution)
    for row in broken:
        yield Finding(f"plugin {row.name}", "problem", str(row.error), "see `tinsmith plugins`")


def _python() -> Finding:
    wanted = SpecifierSet(metadata("tinsmith")["Requires-Python"])
    found = platform.python_version()
    if wanted.contains(found, prereleases=True):
        return Finding("python", "ok", found)
    return Finding("python", "problem", f"{found}; tinsmith needs {wanted}", "make an environment with such a Python")


def _packages(distribution: str) -> Iterator[Finding]:
    """Compare every requirement of a distribution that applies here; its extras are the user's choice."""
    try:
        wanted = [Requirement(text) for text in requires(distribution) or ()]
    except PackageNotFoundError:
        return
    wanted = [each for each in wanted if each.marker is None or each.marker.evaluate({"extra": ""})]
    problems = [problem for each in wanted if (problem := _problem(distribution, each)) is not None]
    yield from problems
    if not problems:
        found = f"{version(distribution)}, its {len(wanted)} requirements are met"
        yield Finding(f"package {distribution}", "ok", found)


def _problem(distribution: str, wanted: Requirement) -> Finding | None:
    remedy = f"pip install '{wanted.name}{wanted.specifier}'"
    try:
        found = version(wanted.name)
    except PackageNotFoundError:
        return Finding(f"package {wanted.name}", "problem", f"missing; {distribution} needs it", remedy)
    if wanted.specifier.contains(found, prereleases=True):
        return None
    return Finding(f"package {wanted.name}", "problem", f"{found}; {distribution} needs {wanted.specifier}", remedy)
