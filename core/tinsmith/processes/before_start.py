"""The checks before a server starts: one list, for `serve`, `doctor` and `check-config`.

Faults visible in the configuration alone are found when it is loaded. Nothing here leaves anything behind.
`check-config` leaves out what a running server holds, so that a file can be checked beside the server that uses it.
"""

from __future__ import annotations

import errno
import socket
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from tinsmith.errors import ConfigError, PluginError, StoreError
from tinsmith.placement.components import AnySpec, own_options
from tinsmith.plugins.loading import Plugins
from tinsmith.processes.assembly import NO_SAMPLER, store_parts
from tinsmith.processes.data_dir_lock import refuse_if_in_use
from tinsmith.processes.durable_directory import ON_A_LOCAL_DISK, directory_faults
from tinsmith.settings import ModelSettings, PluginSection, ServerSettings, Settings

Check = Callable[[Settings, Plugins], Iterator[str]]

_ANYBODY: Final = "key-"
"""The prefix of the tenants of a server without keys."""


@dataclass(frozen=True, slots=True)
class Obstacle:
    """Why a server cannot start."""

    check: str
    reason: str
    may_pass: bool = False  # by itself, so that a server waits for it

    def __str__(self) -> str:
        return f"{self.check}: {self.reason}"


def obstacles(settings: Settings, plugins: Plugins) -> list[Obstacle]:
    """Return everything that keeps a server with these settings from starting on this machine now."""
    return _found(settings, plugins, CHECKS)


def faults_of_file(settings: Settings, plugins: Plugins) -> list[Obstacle]:
    """Return what is wrong with the settings whatever else runs on this machine, and whether or not databases do."""
    checks = {name: look for name, look in CHECKS.items() if name not in _OF_THE_MOMENT}
    return [each for each in _found(settings, plugins, checks) if not each.may_pass]


def _found(settings: Settings, plugins: Plugins, checks: Mapping[str, Check]) -> list[Obstacle]:
    found: list[Obstacle] = []
    for name, look in checks.items():
        try:
            found.extend(Obstacle(name, reason) for reason in look(settings, plugins))
        except (ConfigError, PluginError) as error:
            found.append(Obstacle(name, str(error)))
        except StoreError as error:
            found.append(Obstacle(name, str(error), may_pass=True))
    return found


def refuse(found: list[Obstacle]) -> None:
    """Raise ConfigError if there are any, with a line for each."""
    if len(found) == 1:
        raise ConfigError(str(found[0]))
    if found:
        listed = "\n".join(f"  {each}" for each in found)
        msg = f"the server cannot start, for {len(found)} reasons:\n{listed}"
        raise ConfigError(msg)


def look_at_store(settings: Settings, plugins: Plugins) -> str | None:
    """Return what the store says of itself. Raise ConfigError, or StoreError if it cannot be reached for now."""
    spec, config, context = store_parts(settings, plugins)
    if spec.diagnose is None:
        spec.create(config, context)
        return None
    return spec.diagnose(config, context)


def _quotas(settings: Settings, plugins: Plugins) -> Iterator[str]:
    if plugins.authenticators() or settings.login is not None:  # whose tenants they are is theirs to know
        return
    tenants = sorted({key.tenant for key in settings.server.api_keys})
    for name in settings.quotas.tenants:
        if tenants and name not in tenants:
            known = ", ".join(tenants)
            yield f"quotas.tenants.{name}: no key belongs to this tenant; tenants of `server.api_keys`: {known}"
        elif not tenants and not name.startswith(_ANYBODY):
            yield f"quotas.tenants.{name}: without `server.api_keys`, there is no such tenant; add its key"


def _data_directory(settings: Settings, _plugins: Plugins) -> Iterator[str]:
    refuse_if_in_use(settings.data_dir, shared=settings.server.share_data_dir)
    for fault in directory_faults(settings.data_dir):
        yield f"server.data_dir: {str(settings.data_dir.root)!r}: {fault}; {ON_A_LOCAL_DISK}"


def listen(server: ServerSettings) -> socket.socket:
    """Bind the address before anything is loaded, so that a port in use is reported at once."""
    try:
        [(family, kind, protocol, _, address), *_] = socket.getaddrinfo(
            server.host, server.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
        listener = socket.socket(family, kind, protocol)
    except OSError as error:
        msg = f"server.host: {server.host!r} is not an address of this machine: {error.strerror}"
        raise ConfigError(msg) from error
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(address)
    except OSError as error:
        listener.close()
        raise ConfigError(_bind_failure(server, error)) from error
    return listener


def _bind_failure(server: ServerSettings, error: OSError) -> str:
    match error.errno:
        case errno.EADDRINUSE:
            remedy = "choose another with --port, or --port 0 for a free one"
            return f"server.port: {server.port} is in use on {server.host}; {remedy}"
        case errno.EACCES:
            return f"server.port: {server.port} needs privileges; choose one above 1023"
        case _:
            return f"server.host: cannot listen on {server.host!r}: {error.strerror}; use an address of this machine"


def _trainers(settings: Settings, plugins: Plugins) -> Iterator[str]:
    for model in settings.models:
        if model.backend is not None:
            spec = plugins.backends.get(model.backend.plugin)
            yield from _obstacles_of(f"the backend {spec.name} of {model.name!r}", spec, model.backend, model)


def _samplers(settings: Settings, plugins: Plugins) -> Iterator[str]:
    for index, model in enumerate(settings.models):
        if model.sampler is not None:
            spec = plugins.samplers.get(model.sampler.plugin)
            yield from _obstacles_of(f"the sampler {spec.name} of {model.name!r}", spec, model.sampler, model)
        elif model.backend is not None and not plugins.backends.get(model.backend.plugin).samples:
            others = ", ".join(name for name in plugins.samplers.unambiguous() if name != NO_SAMPLER)
            yield (
                f"models.{index}: the backend {model.backend.plugin} of {model.name!r} only trains; add `sampler: "
                f"{{plugin: NAME}}` with one of {others}, or with {NO_SAMPLER} if nobody is to sample"
            )


def _login(settings: Settings, plugins: Plugins) -> Iterator[str]:
    if settings.login is not None:
        spec = plugins.logins.get(settings.login.plugin)
        if spec.check is not None:
            yield from spec.check(spec.config.model_validate(settings.login.options()))


def _obstacles_of(who: str, spec: AnySpec, section: PluginSection, model: ModelSettings) -> Iterator[str]:
    if spec.check is not None:
        config = spec.config.model_validate(own_options(section, spec))
        yield from (f"{who}: {reason}" for reason in spec.check(config, model.path))


def _raising(look: Callable[[Settings, Plugins], object]) -> Callable[[Settings, Plugins], Iterator[str]]:
    """Make a check of what raises an error if something is wrong."""

    def check(settings: Settings, plugins: Plugins) -> Iterator[str]:
        look(settings, plugins)
        return iter(())

    return check


CHECKS: Final[dict[str, Check]] = {
    "quotas": _quotas,
    "port": _raising(lambda settings, _: listen(settings.server).close()),
    "data directory": _data_directory,
    "database": _raising(look_at_store),
    "login": _login,
    "backend": _trainers,
    "sampler": _samplers,
}
"""Each yields what is wrong, or raises ConfigError, or StoreError if it may pass."""

_OF_THE_MOMENT: Final = frozenset({"port", "data directory"})
