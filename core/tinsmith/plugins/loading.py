"""Find plugins, keep the broken ones apart, and call their hooks: one typed method each. Nobody else touches pluggy.

Every plugin is an entry point of the group `tinsmith`, core's own included. They are loaded one at a time; what goes
wrong with one is kept, shown by `tinsmith plugins`, and raised only when something that only it could offer is asked
for. Built-ins come first, so that of decisions, where the last registered is asked first, they are the default.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib.metadata import EntryPoint, entry_points, version
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

import pluggy

from tinsmith import hookspecs
from tinsmith.backend import AnyBackendSpec, AnySamplerSpec, BackendConfig, BackendSpec, SamplerSpec
from tinsmith.errors import ContractVersionError, PluginError, TinsmithError
from tinsmith.hook_values import Principal
from tinsmith.losses import LossSpec
from tinsmith.plugins.contract_version import CONTRACT_VERSION, built_for, check_built_for
from tinsmith.plugins.registry import Named, Offer, PluginOrigin, Registry, suggestion
from tinsmith.scheduler import SchedulerSpec
from tinsmith.store import StoreSpec

if TYPE_CHECKING:
    import typer
    from fastapi import APIRouter

    from tinsmith.hook_values import OperationFinished, RoutesContext, ServerStarted, ServerStopping
    from tinsmith.settings import Settings

GROUP: Final = "tinsmith"
HOOK_PREFIX: Final = "tinsmith_"
HOOK_NAMES: Final = tuple(name for name in vars(hookspecs) if name.startswith(HOOK_PREFIX))
BUILTINS: Final = tuple(
    EntryPoint(name=name, value=f"tinsmith.builtin.{name}", group=GROUP)
    for name in (
        "losses",
        "schedulers",
        "sql_store",
        "toy_backend",
        "hugging_face_cache",
        "metrics_log",
        "metrics_route",
        "systemd",
        "tiny_model_command",
    )
)

_log = logging.getLogger(__name__)

T = TypeVar("T")
N = TypeVar("N", bound=Named)


@dataclass(frozen=True, slots=True, kw_only=True)
class PluginReport:
    """One row of `tinsmith plugins`."""

    name: str
    distribution: str
    version: str
    contract: int | None = CONTRACT_VERSION  # that it was built for; None where what it says is no version
    offers: tuple[str, ...] = ()  # "backend jax", and the other hooks it implements by their short names
    error: str | None = None  # why it is broken, or which of its offers collide with another plugin's


class Plugins:
    """All plugins of this process. Made by `load`."""

    def __init__(self) -> None:
        self._manager = pluggy.PluginManager(hookspecs.PROJECT_NAME)
        self._manager.add_hookspecs(hookspecs)
        self._origins: dict[object, PluginOrigin] = {}  # by plugin object, in load order
        self._errors: dict[PluginOrigin, PluginError] = {}
        self._backends: Registry[AnyBackendSpec] = Registry("backend")
        self._samplers: Registry[AnySamplerSpec] = Registry("sampler")
        self._stores: Registry[StoreSpec[Any]] = Registry("store")
        self._schedulers: Registry[SchedulerSpec[Any]] = Registry("scheduler")
        self._losses: Registry[LossSpec] = Registry("loss")
        self._registries = (self._backends, self._samplers, self._stores, self._schedulers, self._losses)

    @classmethod
    def load(cls, extra: Sequence[object] = ()) -> Plugins:
        """Load the built-ins, everything installed, and `extra` (modules or objects with hooks). Never raises."""
        plugins = cls()
        for entry_point in BUILTINS:
            plugins._guard(_core_origin(entry_point.name), entry_point.load)
        for entry_point in sorted(entry_points(group=GROUP), key=lambda entry: entry.name):
            plugins._load(entry_point)
        for plugin in extra:
            plugins.add(plugin)
        return plugins

    def add(self, plugin: object, name: str | None = None) -> None:
        """Register one more plugin object, for instance one that was made from settings. Keeps what goes wrong.

        The last one added is asked first for decisions, unless it says `hookimpl(trylast=True)`.
        """
        known = name or str(getattr(plugin, "__name__", type(plugin).__name__))
        self._guard(PluginOrigin(name=known, distribution="(this process)", version="-"), lambda: plugin)

    # registration

    def backends(self) -> dict[str, AnyBackendSpec]:
        return self._backends.unambiguous()

    def backend(self, name: str) -> AnyBackendSpec:
        """Raise PluginError where there is none, with why and what else is installed; the next four likewise."""
        return self._find(self._backends, name)

    def default_backend(self) -> AnyBackendSpec:
        """Return the one installed backend that is not core's own and also samples, or else the only one at all.

        Raise PluginError where that is none or several.
        """
        theirs = {name: self._backends.get(name) for name in self._backends.names_beside("tinsmith")}
        theirs = {name: spec for name, spec in theirs.items() if spec.samples} or theirs
        if len(theirs) == 1:
            return next(iter(theirs.values()))
        if theirs:
            msg = f"several backends are installed: {', '.join(theirs)}; name one as `backend: {{plugin: ...}}`"
        else:
            builtin = ", ".join(self._backends.unambiguous())
            msg = f"no backend is installed besides the built-in {builtin}; install one{self._broken_hint()}"
        raise PluginError(msg)

    def samplers(self) -> dict[str, AnySamplerSpec]:
        return self._samplers.unambiguous()

    def sampler(self, name: str) -> AnySamplerSpec:
        return self._find(self._samplers, name)

    def stores(self) -> dict[str, StoreSpec[Any]]:
        return self._stores.unambiguous()

    def store(self, name: str) -> StoreSpec[Any]:
        return self._find(self._stores, name)

    def schedulers(self) -> dict[str, SchedulerSpec[Any]]:
        return self._schedulers.unambiguous()

    def scheduler(self, name: str) -> SchedulerSpec[Any]:
        return self._find(self._schedulers, name)

    def losses(self) -> dict[str, LossSpec]:
        """Return every loss. Raise PluginError where a name is offered twice: a request could mean either."""
        for message in self._losses.conflicts().values():
            raise PluginError(message)
        return self._losses.unambiguous()

    def routes(self, settings: Settings, context: RoutesContext) -> list[APIRouter]:
        """Collect routers; a plugin that fails is logged, reported, and left out."""
        from fastapi import APIRouter  # here, since engines need no web framework

        found: list[APIRouter] = []
        hook = "tinsmith_register_routes"
        for plugin in self._implementers(hook):
            offer = partial(self._offered, plugin, hook, APIRouter, settings=settings, context=context)
            found.extend(self._attempt(plugin, offer) or [])
        return found

    def add_commands(self, group: typer.Typer) -> None:
        """Let plugins add commands; one that fails is reported."""
        for plugin in self._implementers("tinsmith_register_commands"):
            self._attempt(plugin, partial(self._call, plugin, "tinsmith_register_commands", group=group))

    # decisions

    def authenticate(self, headers: Mapping[str, str]) -> Principal | None:
        """Ask plugin after plugin. AuthenticationError passes through; any other failure refuses, as PluginError."""
        return self._first("tinsmith_authenticate", Principal, headers=headers)

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
        rows = [self._describe(plugin, origin) for plugin, origin in self._origins.items()]
        broken = [
            PluginReport(
                name=who.name,
                distribution=who.distribution,
                version=who.version,
                contract=who.contract,
                error=str(error),
            )
            for who, error in self._broken().items()
        ]
        return rows + broken

    def offers_of(self, name: str) -> list[Offer]:
        """Return what the plugin of that name offers, or plugins, where several distributions use it.

        Raise PluginError where there is none, or it is broken.
        """
        origins = [origin for origin in self._origins.values() if origin.name == name]
        if origins:
            return [offer for who in origins for registry in self._registries for offer in registry.offers_of(who)]
        for who, error in self._broken().items():
            if who.name == name:
                raise error
        for origin in self._origins.values():
            for registry in self._registries:
                if name in registry.names_of(origin):
                    msg = f"no plugin named {name!r}; the {registry.kind} {name!r} is of the plugin {origin.name!r}"
                    raise PluginError(msg)
        names = {origin.name for origin in self._origins.values()}
        msg = f"no plugin named {name!r}{suggestion(name, names)}; `tinsmith plugins` lists them"
        raise PluginError(msg)

    def _describe(self, plugin: object, origin: PluginOrigin) -> PluginReport:
        offers = [f"{each.kind} {name}" for each in self._registries for name in each.names_of(origin)]
        hooks = [name for name in HOOK_NAMES if name not in _SPEC_TYPES and plugin in self._implementers(name)]
        problems = [
            message
            for each in self._registries
            for name, message in each.conflicts().items()
            if name in each.names_of(origin)
        ]
        if origin in self._errors:
            problems.append(str(self._errors[origin]))
        return PluginReport(
            name=origin.name,
            distribution=origin.distribution,
            version=origin.version,
            contract=origin.contract,
            offers=(*offers, *(name.removeprefix(HOOK_PREFIX) for name in hooks)),
            error="; ".join(problems) or None,
        )

    # loading

    def _load(self, entry_point: EntryPoint) -> None:
        """Load what was built for our contract, and run no code of anything else."""
        origin = _origin_of(entry_point)
        try:
            contract = built_for(entry_point)
        except PluginError as error:
            self._errors[replace(origin, contract=None)] = _plugin_error(origin, error)
            return
        origin = replace(origin, contract=contract)
        try:
            check_built_for(contract, distribution=origin.distribution, core=version("tinsmith"))
        except ContractVersionError as error:
            self._errors[origin] = _plugin_error(origin, error)
            return
        self._guard(origin, entry_point.load)

    def _guard(self, origin: PluginOrigin, load: Callable[[], object]) -> None:
        try:
            plugin = load()
            self._register(plugin, origin)
        except (Exception, SystemExit) as error:  # whatever a stranger's module does is kept
            self._errors[origin] = _plugin_error(origin, error)

    def _register(self, plugin: object, origin: PluginOrigin) -> None:
        _refuse_unmarked_hooks(plugin)
        try:
            self._manager.register(plugin, name=f"{origin.distribution}:{origin.name}:{id(plugin)}")
            self._manager.check_pending()
            offers = {hook: self._offered(plugin, hook, spec) for hook, spec in _SPEC_TYPES.items()}
            for specs in offers.values():
                for spec in specs:
                    _check_spec(spec)
        except BaseException:
            if self._manager.is_registered(plugin) and plugin not in self._origins:
                self._manager.unregister(plugin)
            raise
        self._origins[plugin] = origin
        self._backends.add(offers["tinsmith_register_backends"], origin)
        self._samplers.add(offers["tinsmith_register_samplers"], origin)
        self._stores.add(offers["tinsmith_register_stores"], origin)
        self._schedulers.add(offers["tinsmith_register_schedulers"], origin)
        self._losses.add(offers["tinsmith_register_losses"], origin)

    def _offered(self, plugin: object, hook: str, spec_type: type[Any], **arguments: object) -> list[Any]:
        """Call one registration hook of one plugin. Any: pluggy's results are untyped; checked here."""
        found: list[object] = []
        for result in self._call(plugin, hook, **arguments):
            found.extend(result if isinstance(result, list | tuple) else [result])
        for spec in found:
            if not isinstance(spec, spec_type):
                msg = (
                    f"{hook} returned {spec!r:.200} of type {type(spec).__name__}; it must return a "
                    f"{spec_type.__name__}, or a list of them"
                )
                raise PluginError(msg)
        return found

    # calling

    def _call(self, plugin: object, hook: str, **arguments: object) -> list[object]:
        """Call one hook of one plugin alone, so that what goes wrong is known to be its own."""
        others = [other for other in self._manager.get_plugins() if other is not plugin]
        result = self._manager.subset_hook_caller(hook, others)(**arguments)
        if isinstance(result, list):
            return result
        return [] if result is None else [result]  # a hook of which the first result counts

    def _implementers(self, hook: str) -> list[object]:
        """Return the plugins that implement a hook, in pluggy's call order."""
        implementations = reversed(getattr(self._manager.hook, hook).get_hookimpls())
        return list(dict.fromkeys(implementation.plugin for implementation in implementations))

    def _attempt(self, plugin: object, action: Callable[[], T]) -> T | None:
        origin = self._origins[plugin]
        try:
            return action()
        except Exception as error:
            self._errors[origin] = _plugin_error(origin, error)
            _log.exception("plugin %r of %s failed and is left out", origin.name, origin)
            return None

    def _first(self, hook: str, expected: type[T], **arguments: object) -> T | None:
        for plugin in self._implementers(hook):
            origin = self._origins[plugin]
            try:
                results = self._call(plugin, hook, **arguments)
            except TinsmithError:
                raise
            except Exception as error:
                raise _plugin_error(origin, error) from error
            for result in results:
                if isinstance(result, expected):
                    return result
                wrong = f"{hook} returned {type(result).__name__}; it must return {expected.__name__} or None"
                raise _plugin_error(origin, PluginError(wrong))
        return None

    def _tell(self, hook: str, event: object) -> None:
        for plugin in self._implementers(hook):
            try:
                self._call(plugin, hook, event=event)
            except Exception:  # observers must not disturb what they observe
                origin = self._origins[plugin]
                _log.exception("plugin %r of %s failed in %s", origin.name, origin, hook)

    def _find(self, registry: Registry[N], name: str) -> N:
        same_name = [f"; {error}" for who, error in self._broken().items() if who.name == name]
        return registry.get(name, hint="".join(same_name[:1]), last_hint=self._broken_hint())

    def _broken(self) -> dict[PluginOrigin, PluginError]:
        """Return the plugins that could not be loaded, and so offer nothing."""
        return {who: error for who, error in self._errors.items() if who not in self._origins.values()}

    def _broken_hint(self) -> str:
        names = ", ".join(who.name for who in self._broken())
        return f"; broken plugins, see `tinsmith plugins`: {names}" if names else ""


_SPEC_TYPES: Final[Mapping[str, type[Any]]] = {
    "tinsmith_register_backends": BackendSpec,
    "tinsmith_register_samplers": SamplerSpec,
    "tinsmith_register_stores": StoreSpec,
    "tinsmith_register_schedulers": SchedulerSpec,
    "tinsmith_register_losses": LossSpec,
}


def _core_origin(name: str) -> PluginOrigin:
    return PluginOrigin(name=name, distribution="tinsmith", version=version("tinsmith"))


def _origin_of(entry_point: EntryPoint) -> PluginOrigin:
    distribution = entry_point.dist
    if distribution is None:
        return PluginOrigin(name=entry_point.name, distribution="(unknown)", version="-")
    return PluginOrigin(name=entry_point.name, distribution=distribution.name, version=distribution.version)


def _plugin_error(origin: PluginOrigin, error: BaseException) -> PluginError:
    kind, what = PluginError, "broken"
    match error:
        case ContractVersionError():
            kind, what, reason, remedy = ContractVersionError, "refused", str(error), ""
        case PluginError():
            reason, remedy = str(error), ""
        case pluggy.PluginValidationError():
            reason, remedy = _validation_reason(error), ""
        case ModuleNotFoundError(name=str(missing)):
            reason, remedy = str(error), f"; install what provides {missing!r} in this environment, or reinstall it"
        case _:
            reason, remedy = f"{type(error).__name__}: {error}", f"; reinstall or uninstall {origin.distribution}"
    wrapped = kind(f"plugin {origin.name!r} of {origin} is {what}: {reason}{remedy}")
    wrapped.__cause__ = error
    return wrapped


def _validation_reason(error: pluggy.PluginValidationError) -> str:
    """Say pluggy's complaint in one line, with the nearest hook where one is misspelt."""
    misspelt = [name for name in dir(error.plugin) if name.startswith(HOOK_PREFIX) and name not in HOOK_NAMES]
    if misspelt:
        return f"there is no hook {misspelt[0]!r}{suggestion(misspelt[0], HOOK_NAMES)}"
    return " ".join(str(error).split())


def _refuse_unmarked_hooks(plugin: object) -> None:
    """Pluggy ignores a hook without its decorator in silence."""
    for name in dir(plugin):
        function = getattr(plugin, name) if name.startswith(HOOK_PREFIX) else None
        if callable(function) and getattr(function, f"{hookspecs.PROJECT_NAME}_impl", None) is None:
            msg = f"{name} is not marked; write @tinsmith.hookimpl above it"
            raise PluginError(msg)


def _check_spec(spec: Any) -> None:  # Any: one of the types of _SPEC_TYPES
    if not isinstance(spec.name, str) or not spec.name:
        msg = f"{type(spec).__name__} has the name {spec.name!r}; it must be a non-empty string"
        raise PluginError(msg)
    if isinstance(spec, LossSpec):
        return
    if not isinstance(spec.config, type) or not issubclass(spec.config, BackendConfig):
        msg = f"{type(spec).__name__} {spec.name!r} has the config {spec.config!r}; it must subclass BackendConfig"
        raise PluginError(msg)
