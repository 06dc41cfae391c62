"""Where plugins are found: core's own modules, and the entry points of installed distributions."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points, version
from typing import Final

from tinsmith.plugins.registry import PluginOrigin
from tinsmith.plugins.requirement import check_requirement

GROUP: Final = "tinsmith"
BUILTINS: Final = (
    "losses",
    "schedulers",
    "sql_store",
    "memory_store",
    "toy_backend",
    "toy_sampler",
    "no_sampler",
    "hugging_face_cache",
    "metrics_log",
    "metrics_route",
    "systemd",
    "tiny_model_command",
)

Found = tuple[PluginOrigin, Callable[[], object]]
"""A plugin that is not loaded yet: where it comes from, and what loads it or raises why it must not be."""


def builtin_plugins() -> Iterator[Found]:
    for name in BUILTINS:
        origin = PluginOrigin(name=name, distribution="tinsmith", version=version("tinsmith"))
        yield origin, partial(import_module, f"tinsmith.builtin.{name}")


def installed_plugins() -> Iterator[Found]:
    """Yield every installed plugin. No code of one that needs another tinsmith will run."""
    for entry_point in sorted(entry_points(group=GROUP), key=lambda entry: entry.name):
        yield _origin_of(entry_point), partial(_load, entry_point)


def _load(entry_point: EntryPoint) -> object:
    check_requirement(entry_point)
    return entry_point.load()


def _origin_of(entry_point: EntryPoint) -> PluginOrigin:
    distribution = entry_point.dist
    if distribution is None:
        return PluginOrigin(name=entry_point.name, distribution="(unknown)", version="-")
    return PluginOrigin(name=entry_point.name, distribution=distribution.name, version=distribution.version)
