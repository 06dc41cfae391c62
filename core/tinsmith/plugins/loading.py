"""All plugins of a process: loaded one at a time, kept in registries, and called through one typed method per hook.

A failure of one plugin is kept, shown by `tinsmith plugins`, and raised only when something is asked for that this
plugin alone could offer. Built-ins are loaded first. Decisions ask the plugin that was registered last first, so the
built-ins are the default.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

from tinsmith.backend import AnyBackendSpec, AnySamplerSpec, BackendSpec, SamplerSpec
from tinsmith.errors import PluginError, TinsmithError
from tinsmith.hook_values import AnyLoginSpec, LoginSpec, Principal
from tinsmith.losses import LossSpec
from tinsmith.plugins.discovery import (
    HOOK_NAMES,
    HOOK_PREFIX,
    HookCaller,
    builtin_plugins,
    check_spec,
    installed_plugins,
    make_tables,
    plugin_error,
    refuse_unmarked_hooks,
)
from tinsmith.plugins.registry import Offer, PluginOrigin, PluginReport, Registry, suggestion
from tinsmith.scheduler import SchedulerSpec
from tinsmith.store import StoreSpec, Tables, TablesSpec
from tinsmith.tracer import AnyTracerSpec, TracerSpec

if TYPE_CHECKING:
    import typer
    from fastapi import APIRouter

    from tinsmith.hook_values import OperationFinished, RoutesContext, ServerStarted, ServerStopping
    from tinsmith.settings import Settings

SPEC_TYPES: Final[Mapping[str, type[Any]]] = {  # by registration hook
    "tinsmith_register_backends": BackendSpec,
    "tinsmith_register_samplers": SamplerSpec,
    "tinsmith_register_stores": StoreSpec,
    "tinsmith_register_schedulers": SchedulerSpec,
    "tinsmith_register_losses": LossSpec,
    "tinsmith_register_logins": LoginSpec,
    "tinsmith_register_tracers": TracerSpec,
    "tinsmith_register_tables": TablesSpec,
}

_log = logging.getLogger(__name__)

T = TypeVar("T")


class Plugins:
    """Made by `load`. Look offers up in the registries: `plugins.backends.get("jax")`."""

    def __init__(self) -> None:
        self._hooks = HookCaller()
        self._origins: dict[object, PluginOrigin] = {}  # by plugin object, in load order
        self._errors: dict[PluginOrigin, PluginError] = {}
        self.backends: Registry[AnyBackendSpec] = Registry("backend", self._hint)
        self.samplers: Registry[AnySamplerSpec] = Registry("sampler", self._hint)
        self.stores: Registry[StoreSpec[Any]] = Registry("store", self._hint)
        self.schedulers: Registry[SchedulerSpec[Any]] = Registry("scheduler", self._hint)
        self.losses: Registry[LossSpec] = Registry("loss", self._hint)
        self.logins: Registry[AnyLoginSpec] = Registry("login", self._hint)
        self.tracers: Registry[AnyTracerSpec] = Registry("tracer", self._hint)
        self.tables: Registry[TablesSpec] = Registry("tables", self._hint)
        everything = (
            *(self.backends, self.samplers, self.stores, self.schedulers),
            *(self.losses, self.logins, self.tracers, self.tables),
        )
        self._registries: dict[str, Registry[Any]] = dict(zip(SPEC_TYPES, everything, strict=True))

    @classmethod
    def load(cls, extra: Sequence[object] = ()) -> Plugins:
        """Load the built-ins, everything installed, and `extra` (modules or objects with hooks). Never raises."""
        plugins = cls()
        for origin, load in (*builtin_plugins(), *installed_plugins()):
            plugins._load(origin, load)
        for plugin in extra:
            plugins.add(plugin)
        return plugins

    def add(self, plugin: object, name: str | None = None) -> None:
        """Register one more plugin object, for instance one that was made from settings. Keeps what goes wrong.

        The last one added is asked first for decisions, unless it says `hookimpl(trylast=True)`.
        """
        known = name or str(getattr(plugin, "__name__", type(plugin).__name__))
        self._load(PluginOrigin(name=known, distribution="(this process)", version="-"), lambda: plugin)

    # registration

    def default_backend(self) -> AnyBackendSpec:
        """Return the only installed backend that is not built in, preferring backends that also sample.

        Raise PluginError if there is none, or more than one.
        """
        theirs = [self.backends.get(name) for name in self.backends.names_beside("tinsmith")]
        theirs = [spec for spec in theirs if spec.samples] or theirs
        if len(theirs) == 1:
            return theirs[0]
        if theirs:
            names = ", ".join(spec.name for spec in theirs)
            msg = f"several backends are installed: {names}; name one as `backend: {{plugin: ...}}`"
        else:
            builtin = ", ".join(self.backends.unambiguous())
            msg = f"no backend is installed except the built-in {builtin}; install one{self._broken_hint()}"
        raise PluginError(msg)

    def routes(self, settings: Settings, context: RoutesContext) -> list[APIRouter]:
        """Collect routers. A plugin that fails is logged, reported, and left out."""
        from fastapi import APIRouter  # here, since engines need no web framework

        found: list[APIRouter] = []
        hook = "tinsmith_register_routes"
        for plugin in self._hooks.implementers(hook):
            offer = partial(self._hooks.offered, plugin, hook, APIRouter, settings=settings, context=context)
            found.extend(self._attempt(plugin, offer) or [])
        return found

    def add_commands(self, group: typer.Typer) -> None:
        """Let plugins add commands. A plugin that fails is reported."""
        hook = "tinsmith_register_commands"
        for plugin in self._hooks.implementers(hook):
            self._attempt(plugin, partial(self._hooks.call, plugin, hook, group=group))

    def make_tables(self) -> dict[str, Tables]:
        """Return the tables that packages keep in the request store, by name.

        Raise PluginError if a package cannot make its own, or two offer the same name: nothing may be kept half.
        """
        return {name: make_tables(spec) for name, spec in self.tables.all().items()}

    # decisions

    def authenticate(self, headers: Mapping[str, str], method: str = "GET") -> Principal | None:
        """Ask one plugin after the other. AuthenticationError passes through; any other failure is a PluginError."""
        return self._first("tinsmith_authenticate", Principal, headers=headers, method=method)

    def authenticators(self) -> list[object]:
        """Return the plugins that `authenticate` asks, in order."""
        return self._hooks.implementers("tinsmith_authenticate")

    def resolve_base_model(self, name: str) -> Path | None:
        return self._first("tinsmith_resolve_base_model", Path, name=name)

    # observation

    def server_started(self, event: ServerStarted) -> None:
        self._tell("tinsmith_server_started", event)

    def operation_finished(self, event: OperationFinished) -> None:
        self._tell("tinsmith_operation_finished", event)

    def server_stopping(self, event: ServerStopping) -> None:
        self._tell("tinsmith_server_stopping", event)

    # report

    def report(self) -> list[PluginReport]:
        """Describe every plugin, the broken ones included, in load order."""
        loaded = [
            PluginReport(**asdict(origin), offers=self._offers_in_short(plugin), error=self._problems(origin))
            for plugin, origin in self._origins.items()
        ]
        return loaded + [PluginReport(**asdict(origin), error=str(error)) for origin, error in self._broken().items()]

    def offers_of(self, name: str) -> list[Offer]:
        """Return everything that plugins of that name offer; several distributions may share a name.

        Raise PluginError if there is no such plugin, or it is broken.
        """
        origins = [origin for origin in self._origins.values() if origin.name == name]
        if origins:
            return [offer for who in origins for registry in self._registries.values() for offer in registry.of(who)]
        for who, error in self._broken().items():
            if who.name == name:
                raise error
        for origin in self._origins.values():
            for registry in self._registries.values():
                if name in registry.names_of(origin):
                    msg = f"no plugin named {name!r}; the {registry.kind} {name!r} is of the plugin {origin.name!r}"
                    raise PluginError(msg)
        names = {origin.name for origin in self._origins.values()}
        msg = f"no plugin named {name!r}{suggestion(name, names)}; `tinsmith plugins` lists them"
        raise PluginError(msg)

    def _offers_in_short(self, plugin: object) -> tuple[str, ...]:
        origin = self._origins[plugin]
        offers = [f"{each.kind} {name}" for each in self._registries.values() for name in each.names_of(origin)]
        hooks = (name for name in HOOK_NAMES if name not in SPEC_TYPES and plugin in self._hooks.implementers(name))
        return (*offers, *(name.removeprefix(HOOK_PREFIX) for name in hooks))

    def _problems(self, origin: PluginOrigin) -> str | None:
        problems = [message for each in self._registries.values() for message in each.conflicts_of(origin)]
        if origin in self._errors:
            problems.append(str(self._errors[origin]))
        return "; ".join(problems) or None

    # loading

    def _load(self, origin: PluginOrigin, load: Callable[[], object]) -> None:
        try:
            self._register(load(), origin)
        except (Exception, SystemExit) as error:  # whatever a stranger's module does is kept
            self._errors[origin] = plugin_error(origin, error)

    def _register(self, plugin: object, origin: PluginOrigin) -> None:
        refuse_unmarked_hooks(plugin)
        try:
            self._hooks.register(plugin, f"{origin.distribution}:{origin.name}:{id(plugin)}")
            offers = {hook: self._hooks.offered(plugin, hook, spec) for hook, spec in SPEC_TYPES.items()}
            for spec in (spec for specs in offers.values() for spec in specs):
                check_spec(spec)
        except BaseException:
            if plugin not in self._origins:
                self._hooks.unregister(plugin)
            raise
        self._origins[plugin] = origin
        for hook, specs in offers.items():
            self._registries[hook].add(specs, origin)

    # calling

    def _attempt(self, plugin: object, action: Callable[[], T]) -> T | None:
        origin = self._origins[plugin]
        try:
            return action()
        except Exception as error:
            self._errors[origin] = plugin_error(origin, error)
            _log.exception("plugin %r of %s failed and is left out", origin.name, origin)
            return None

    def _first(self, hook: str, expected: type[T], **arguments: object) -> T | None:
        for plugin in self._hooks.implementers(hook):
            origin = self._origins[plugin]
            try:
                results = self._hooks.call(plugin, hook, **arguments)
            except TinsmithError:
                raise
            except Exception as error:
                raise plugin_error(origin, error) from error
            for result in results:
                if isinstance(result, expected):
                    return result
                wrong = f"{hook} returned {type(result).__name__}; it must return {expected.__name__} or None"
                raise plugin_error(origin, PluginError(wrong))
        return None

    def _tell(self, hook: str, event: object) -> None:
        for plugin in self._hooks.implementers(hook):
            try:
                self._hooks.call(plugin, hook, event=event)
            except Exception:  # observers must not disturb what they observe
                origin = self._origins[plugin]
                _log.exception("plugin %r of %s failed in %s", origin.name, origin, hook)

    # what is broken

    def _broken(self) -> dict[PluginOrigin, PluginError]:
        """Return the plugins that could not be loaded, and so offer nothing."""
        return {who: error for who, error in self._errors.items() if who not in self._origins.values()}

    def _hint(self, name: str, similar: str) -> str:
        """Why nothing of that name is offered: its plugin is broken, else `similar`, else any broken plugins."""
        for who, error in self._broken().items():
            if who.name == name:
                return f"; {error}"
        return similar or self._broken_hint()

    def _broken_hint(self) -> str:
        names = ", ".join(who.name for who in self._broken())
        return f"; broken plugins, see `tinsmith plugins`: {names}" if names else ""
