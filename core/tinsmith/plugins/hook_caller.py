"""The one place that talks to pluggy: it calls a hook of one plugin at a time, so that a failure has an owner."""

from __future__ import annotations

from typing import Any, Final

import pluggy

from tinsmith import hookspecs
from tinsmith.errors import PluginError

HOOK_PREFIX: Final = "tinsmith_"
HOOK_NAMES: Final = tuple(name for name in vars(hookspecs) if name.startswith(HOOK_PREFIX))


class HookCaller:
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
