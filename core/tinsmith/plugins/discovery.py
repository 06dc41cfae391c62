"""Finds plugins, says what is wrong with one, and calls their hooks.

Plugins are core's own modules, and what the entry points of installed distributions name.

A plugin's distribution requires tinsmith as any package does, for instance `tinsmith~=0.1`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points, version
from pathlib import Path
from typing import Any, Final

import pluggy
from packaging.requirements import Requirement

from tinsmith import hookspecs
from tinsmith.backend import BackendConfig
from tinsmith.errors import PluginError
from tinsmith.losses import LossSpec
from tinsmith.plugins.registry import PluginOrigin, suggestion
from tinsmith.store import Tables, TablesSpec

GROUP: Final = "tinsmith"
HOOK_PREFIX: Final = "tinsmith_"
HOOK_NAMES: Final = tuple(name for name in vars(hookspecs) if name.startswith(HOOK_PREFIX))
BUILTINS: Final = (
    "losses",
    "schedulers",
    "sql_store",
    "scratch_store",
    "toy_backend",
    "toy_sampler",
    "no_sampler",
    "hugging_face_cache",
    "metrics_log",
    "metrics_route",
    "page",
    "systemd",
    "tiny_model_command",
)

FEATURES: Final = Path(__file__).parent.parent / "features"

Found = tuple[PluginOrigin, Callable[[], object]]
"""A plugin that is not loaded yet: where it comes from, and what loads it or raises why it must not be."""


def check_requirement(entry_point: EntryPoint) -> None:
    """Raise PluginError if the distribution of a plugin does not admit this version of tinsmith."""
    distribution = entry_point.dist
    if distribution is None:
        return
    core = version("tinsmith")
    for each in map(Requirement, distribution.requires or ()):
        applies = each.marker is None or each.marker.evaluate({"extra": ""})
        if each.name.lower() == "tinsmith" and applies and not each.specifier.contains(core, prereleases=True):
            msg = (
                f"it needs tinsmith{each.specifier}, and this is tinsmith {core}; install a release of "
                f"{distribution.name} that admits it, or another tinsmith"
            )
            raise PluginError(msg)


def builtin_plugins() -> Iterator[Found]:
    """Yield the core's own plugins, and its features: each folder there is one, and can be deleted."""
    for name in BUILTINS:
        yield _own(name), partial(import_module, f"tinsmith.builtin.{name}")
    for folder in sorted(FEATURES.glob("*/plugin.py")):
        name = folder.parent.name
        yield _own(name), partial(import_module, f"tinsmith.features.{name}.plugin")


def _own(name: str) -> PluginOrigin:
    return PluginOrigin(name=name, distribution="tinsmith", version=version("tinsmith"))


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


def plugin_error(origin: PluginOrigin, error: BaseException) -> PluginError:
    """Wrap what a plugin raised. The result has `error` as its cause."""
    match error:
        case PluginError():
            reason, remedy = str(error), ""
        case pluggy.PluginValidationError():
            reason, remedy = _validation_reason(error), ""
        case ModuleNotFoundError(name=str(missing)):
            reason, remedy = str(error), f"; install what provides {missing!r} in this environment, or reinstall it"
        case _:
            reason, remedy = f"{type(error).__name__}: {error}", f"; reinstall or uninstall {origin.distribution}"
    wrapped = PluginError(f"plugin {origin.name!r} of {origin} is broken: {reason}{remedy}")
    wrapped.__cause__ = error
    return wrapped


def _validation_reason(error: pluggy.PluginValidationError) -> str:
    """Put pluggy's complaint in one line. If a hook is misspelt, suggest the nearest one."""
    misspelt = [name for name in dir(error.plugin) if name.startswith(HOOK_PREFIX) and name not in HOOK_NAMES]
    if misspelt:
        return f"there is no hook {misspelt[0]!r}{suggestion(misspelt[0], HOOK_NAMES)}"
    return " ".join(str(error).split())


def refuse_unmarked_hooks(plugin: object) -> None:
    """Raise PluginError for a hook without its decorator, which pluggy would ignore silently."""
    for name in dir(plugin):
        function = getattr(plugin, name) if name.startswith(HOOK_PREFIX) else None
        if callable(function) and getattr(function, f"{hookspecs.PROJECT_NAME}_impl", None) is None:
            msg = f"{name} is not marked; write @tinsmith.hookimpl above it"
            raise PluginError(msg)


def check_spec(spec: Any) -> None:
    if not isinstance(spec.name, str) or not spec.name:
        msg = f"{type(spec).__name__} has the name {spec.name!r}; it must be a non-empty string"
        raise PluginError(msg)
    if isinstance(spec, LossSpec | TablesSpec):
        return
    if not isinstance(spec.config, type) or not issubclass(spec.config, BackendConfig):
        msg = f"{type(spec).__name__} {spec.name!r} has the config {spec.config!r}; it must subclass BackendConfig"
        raise PluginError(msg)


def make_tables(spec: TablesSpec) -> Tables:
    """Raise PluginError for a table that does not bear the spec's name: it could be another package's."""
    tables = spec.create()
    for name in tables.metadata.tables:
        if name != spec.name and not name.startswith(f"{spec.name}_"):
            msg = f"tables {spec.name!r}: the table {name!r} must be named {spec.name}, or begin with {spec.name}_"
            raise PluginError(msg)
    return tables


class HookCaller:
    """The one place that talks to pluggy: it calls a hook of one plugin at a time, so that a failure has an owner."""

    def __init__(self) -> None:
        self._manager = pluggy.PluginManager(hookspecs.PROJECT_NAME)
        self._manager.add_hookspecs(hookspecs)

    def register(self, plugin: object, name: str) -> None:
        """Raise what pluggy raises, for instance for a hook that does not exist."""
        self._manager.register(plugin, name=name)
        self._manager.check_pending()

    def unregister(self, plugin: object) -> None:
        if self._manager.is_registered(plugin):
            self._manager.unregister(plugin)

    def implementers(self, hook: str) -> list[object]:
        """Return the plugins that implement a hook, in pluggy's call order."""
        implementations = reversed(getattr(self._manager.hook, hook).get_hookimpls())
        return list(dict.fromkeys(implementation.plugin for implementation in implementations))

    def call(self, plugin: object, hook: str, **arguments: object) -> list[object]:
        others = [other for other in self._manager.get_plugins() if other is not plugin]
        result = self._manager.subset_hook_caller(hook, others)(**arguments)
        if isinstance(result, list):
            return result
        return [] if result is None else [result]  # pluggy returns a bare result for a first-result hook

    def offered(self, plugin: object, hook: str, spec_type: type[Any], **arguments: object) -> list[Any]:
        """Call one registration hook of one plugin. Any: pluggy's results are untyped; they are checked here."""
        found: list[object] = []
        for result in self.call(plugin, hook, **arguments):
            found.extend(result if isinstance(result, list | tuple) else [result])
        for spec in found:
            if not isinstance(spec, spec_type):
                msg = (
                    f"{hook} returned {spec!r:.200} of type {type(spec).__name__}; it must return a "
                    f"{spec_type.__name__}, or a list of them"
                )
                raise PluginError(msg)
        return found
