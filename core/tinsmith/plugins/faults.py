"""What can be wrong with a plugin, as one message that names the plugin, its distribution and the remedy."""

from __future__ import annotations

from typing import Any

import pluggy

from tinsmith import hookspecs
from tinsmith.backend import BackendConfig
from tinsmith.errors import PluginError
from tinsmith.losses import LossSpec
from tinsmith.plugins.hook_caller import HOOK_NAMES, HOOK_PREFIX
from tinsmith.plugins.registry import PluginOrigin, suggestion


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
    if isinstance(spec, LossSpec):
        return
    if not isinstance(spec.config, type) or not issubclass(spec.config, BackendConfig):
        msg = f"{type(spec).__name__} {spec.name!r} has the config {spec.config!r}; it must subclass BackendConfig"
        raise PluginError(msg)
