"""Read, merge and check the whole configuration before anything starts.

Flags take precedence over `TINSMITH_` variables, variables over the file, the file over the defaults. Everything is
checked in one pass, including the plugins' own sections, and all problems are reported together.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final

from pydantic import BaseModel, ValidationError

from tinsmith.backend import BackendSpec, SamplerSpec
from tinsmith.errors import ConfigError, PluginError, UserError
from tinsmith.plugins.loading import Plugins
from tinsmith.plugins.registry import suggestion
from tinsmith.settings import DeviceSettings, KeySource, ModelSettings, PluginSection, Settings
from tinsmith.settings.schema import HASHED, repeated_keys
from tinsmith.settings.secrets import cleaned, hidden, is_secret_name, remember_keys, shown
from tinsmith.settings.sources import (
    CONFIG_VARIABLE,
    ENV_NESTING,
    ENV_PREFIX,
    Flag,
    KeyPath,
    Layers,
    environment_path,
    format_key,
    read_environment,
    read_file,
    read_flags,
    read_list,
)
from tinsmith_checkpoints.huggingface.hub_cache import HubReference, is_offline, offline_message

_API_KEYS: Final[KeyPath] = ("server", "api_keys")
_DIGEST: Final = re.compile("[0-9a-f]{64}")
_REMEDIES: Final = {
    "string_type": "put it in quotes",
    "missing": "add it",
    "model_type": "write a mapping of keys",
    "model_attributes_type": "write a mapping of keys",
    "tuple_type": "write a list",
}


def load_settings(
    plugins: Plugins,
    *,
    file: Path | None = None,
    environ: Mapping[str, str],
    flags: Iterable[Flag] = (),
    needs_models: bool = True,
) -> Settings:
    """Return settings in which every model has a backend, and a path if its backend needs one.

    Without `needs_models` there may be no models, and those given are returned as they were written.
    Raise ConfigError with one line for each problem: source, key, what is wrong, value, remedy.
    """
    layers, _ = _read_layers(file_of(file, environ), environ, flags)
    problems = _Problems(layers)
    _check_stray_variables(environ, problems)
    settings: Settings | None = _validate(Settings, layers.tree(), (), problems)
    _check_plugin_sections(layers.tree(), plugins, problems)
    if settings is not None:
        settings = _resolve(settings, plugins, problems, needs_models=needs_models)
    problems.raise_if_any()
    assert settings is not None
    return settings


def load_api_keys(*, file: Path | None, environ: Mapping[str, str], flags: Iterable[Flag]) -> KeySource:
    """Return the API keys alone, for a server that is running. There may be none.

    Raise ConfigError if a key is wrong, or if anything else is that can be seen without the plugins.
    """
    layers, files = _read_layers(file_of(file, environ), environ, flags)
    problems = _Problems(layers)
    settings: Settings | None = _validate(Settings, layers.tree(), (), problems)
    if settings is not None:
        _check_each_key(settings, problems)
    problems.raise_if_any()
    assert settings is not None
    keys = settings.server.api_keys
    plain = {layers.source_of((*_API_KEYS, index, "key")) for index, key in enumerate(keys) if not key.is_hashed}
    holds_plain = [each for each in files if any(str(source).startswith(f"{each}:") for source in plain)]
    return KeySource(keys=keys, files=files, plain_in=tuple(holds_plain))


def file_of(file: Path | None, environ: Mapping[str, str]) -> Path | None:
    """Return the configuration file: `file`, else the one that the environment names."""
    if file is None and environ.get(CONFIG_VARIABLE):
        return Path(environ[CONFIG_VARIABLE])
    return file


def _read_layers(
    file: Path | None, environ: Mapping[str, str], flags: Iterable[Flag]
) -> tuple[Layers, tuple[Path, ...]]:
    """Return the layers, and the files that were read."""
    layers, files = Layers(), [] if file is None else [file]
    for each in files:
        read_file(layers, each)
    read_environment(layers, environ)
    read_flags(layers, flags)
    _remember_secrets(layers.tree())
    server = layers.tree().get("server")
    if isinstance(server, dict) and isinstance(named := server.get("api_keys_file"), str):
        files.append(Path(named).expanduser())
        read_list(layers, files[-1], _API_KEYS, what="the file of API keys")
        _remember_secrets(layers.tree())
    return layers, tuple(files)


def _remember_secrets(tree: Mapping[str, Any]) -> None:
    """Remember them before anything is said about mistakes, wherever in a wrong configuration they are."""
    hidden(dict(tree))
    server = tree.get("server")
    remember_keys(server.get("api_keys") if isinstance(server, dict) else None)


def is_loopback(host: str) -> bool:
    """Return whether only this machine can reach a server that listens on `host`."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


class _Problems:
    """The problems found so far, in order."""

    def __init__(self, layers: Layers) -> None:
        self._layers = layers
        self._lines: dict[str, None] = {}  # ordered, without repeats

    def origin(self, path: KeyPath) -> str | None:
        return self._layers.source_of(path)

    def add(self, path: KeyPath, reason: str, *, source: str | None = None) -> None:
        origin = source or self._layers.source_of(path)
        self._lines[cleaned(": ".join(part for part in (origin, format_key(path), reason) if part))] = None

    def raise_if_any(self) -> None:
        if not self._lines:
            return
        if len(self._lines) == 1:
            raise ConfigError(next(iter(self._lines)))
        listed = "\n".join(f"  {line}" for line in self._lines)
        msg = f"{len(self._lines)} problems in the configuration:\n{listed}"
        raise ConfigError(msg)


def _validate(model: type[BaseModel], tree: object, prefix: KeyPath, problems: _Problems) -> Any:
    try:
        return model.model_validate(tree)
    except ValidationError as error:
        for details in error.errors(include_url=False):
            path = (*prefix, *details["loc"])
            problems.add(path, _reason(model, details["loc"], dict(details)))
        return None


def _reason(model: type[BaseModel], location: KeyPath, details: dict[str, Any]) -> str:
    kind = details["type"]
    if kind == "extra_forbidden":
        known = _fields_at(model, location[:-1])
        return f"unknown key, allowed: {', '.join(known)}{suggestion(str(location[-1]), known)}"
    if kind == "value_error":
        return str(details["ctx"]["error"])
    text = details["msg"][:1].lower() + details["msg"][1:]
    found = "" if kind == "missing" else f", got {_shown(location, details['input'])}"
    remedy = _REMEDIES.get(kind)
    return f"{text}{found}{f'; {remedy}' if remedy else ''}"


def _shown(location: KeyPath, value: object) -> str:
    is_secret = any(isinstance(part, str) and is_secret_name(part) for part in location)
    return "a value that is not shown" if is_secret else f"{shown(hidden(value))!r:.200}"


def _fields_at(model: type[BaseModel], location: KeyPath) -> list[str]:
    """Return the field names of the nested model at a location."""
    for part in location:
        if isinstance(part, str) and part in model.model_fields:
            model = _model_in(model.model_fields[part].annotation) or model
    return sorted(model.model_fields)


def _model_in(annotation: Any) -> type[BaseModel] | None:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    for argument in getattr(annotation, "__args__", ()):
        if (found := _model_in(argument)) is not None:
            return found
    return None


def _check_stray_variables(environ: Mapping[str, str], problems: _Problems) -> None:
    """Refuse TINSMITH_PORT instead of TINSMITH_SERVER__PORT: it would be ignored silently.

    Other unknown variables are accepted, because plugins may have variables of their own.
    """
    by_leaf = {
        leaf: f"{ENV_PREFIX}{section}{ENV_NESTING}{leaf}".upper()
        for section, field in Settings.model_fields.items()
        for leaf in (_fields_at(Settings, (section,)) if _model_in(field.annotation) else ())
    }
    for name in environ:
        path = environment_path(name)
        if path is not None and len(path) == 1 and path[0] in by_leaf:
            problems.add((), f"no such setting; did you mean {by_leaf[str(path[0])]}?", source=name)


# Plugin sections ------------------------------------------------------------------------------------------------------


def _check_plugin_sections(tree: dict[str, Any], plugins: Plugins, problems: _Problems) -> None:
    """Check each plugin's options against its config class, even if other sections are wrong. Any: not validated."""
    defaults = Settings()
    sections: list[tuple[KeyPath, object, Any]] = [
        (("store",), tree.get("store", {"plugin": defaults.store.plugin}), plugins.stores.get),
        (("scheduler",), tree.get("scheduler", {"plugin": defaults.scheduler.plugin}), plugins.schedulers.get),
        (("login",), tree.get("login"), plugins.logins.get),
        (("tracing",), tree.get("tracing"), plugins.tracers.get),
    ]
    models = tree.get("models")
    for index, model in enumerate(models if isinstance(models, list) else ()):
        if isinstance(model, dict):
            sections.append((("models", index, "backend"), model.get("backend"), plugins.backends.get))
            sections.append((("models", index, "sampler"), model.get("sampler"), plugins.samplers.get))
    for path, section, find in sections:
        if not isinstance(section, dict) or not isinstance(section.get("plugin"), str):
            continue  # absent, or already reported
        options = {key: value for key, value in section.items() if key != "plugin"}
        try:
            spec = find(section["plugin"])
        except PluginError as error:
            problems.add((*path, "plugin"), str(error))
        else:
            placed = isinstance(spec, BackendSpec | SamplerSpec) and spec.demand is not None
            ours = {key: options.pop(key) for key in DeviceSettings.model_fields if placed and key in options}
            _validate(spec.config, options, path, problems)
            _validate(DeviceSettings, ours, path, problems)


# Checks that involve several sections --------------------------------------------------------------------------------


def _resolve(settings: Settings, plugins: Plugins, problems: _Problems, *, needs_models: bool) -> Settings:
    server = settings.server.model_copy(update={"data_dir": settings.data_dir.root})
    if not needs_models:
        return settings.model_copy(update={"server": server})
    _check_keys(settings, problems)
    if not settings.models:
        problems.add(
            ("models",), "no model to serve; give `tinsmith serve MODEL`, --base-model, or `models:` in a file"
        )
    _check_engines(settings, problems)
    models = tuple(_resolve_model(index, model, plugins, problems) for index, model in enumerate(settings.models))
    return settings.model_copy(update={"models": models, "server": server})


def _check_keys(settings: Settings, problems: _Problems) -> None:
    server = settings.server
    if not is_loopback(server.host) and not server.api_keys and settings.login is None:
        problems.add(
            ("server", "host"),
            f"refused: everybody who reaches {server.host!r} could use the server; add `server.api_keys` or `login`, "
            "or listen on 127.0.0.1",
        )
    _check_each_key(settings, problems)


def _check_each_key(settings: Settings, problems: _Problems) -> None:
    keys = settings.server.api_keys
    for index, key in enumerate(keys):
        if key.is_hashed and not _DIGEST.fullmatch(key.digest):
            problems.add(
                (*_API_KEYS, index, "key"), f"{HASHED!r} is not followed by the 64 hexadecimal digits of a SHA-256"
            )
        elif not key.is_hashed and not key.key.get_secret_value().startswith("tml-"):
            problems.add((*_API_KEYS, index, "key"), "the SDK refuses keys that do not start with 'tml-'")
    for before, index in repeated_keys(keys):
        first = format_key((*_API_KEYS, before))
        problems.add(
            (*_API_KEYS, index, "key"),
            f"is the key of {first} again ({problems.origin((*_API_KEYS, before, 'key'))}), which one tenant alone can "
            "have; keep one of the entries, or make another key",
        )


def _check_engines(settings: Settings, problems: _Problems) -> None:
    for index, name in enumerate(settings.supervisor.engines or ()):
        try:
            settings.model(name)
        except UserError as error:
            problems.add(("supervisor", "engines", index), str(error))


def _resolve_model(index: int, model: ModelSettings, plugins: Plugins, problems: _Problems) -> ModelSettings:
    path: KeyPath = ("models", index)
    try:
        spec = plugins.backends.get(model.backend.plugin) if model.backend else plugins.default_backend()
    except PluginError as error:
        if model.backend is None:  # otherwise it was reported with its section
            problems.add((*path, "backend"), str(error))
        return model
    backend = model.backend or PluginSection(plugin=spec.name)
    if not spec.needs_model_path and model.path is None:
        return model.model_copy(update={"backend": backend})
    directory = _find_directory(path, model, plugins, problems)
    revision = model.revision if directory is None else None  # its directory is the revision's
    return model.model_copy(update={"backend": backend, "path": directory, "revision": revision})


def _find_directory(path: KeyPath, model: ModelSettings, plugins: Plugins, problems: _Problems) -> Path | None:
    """Return the model's directory, or None if its engine has to download it first."""
    key: KeyPath = (*path, "path") if model.path else (*path, "name")
    if model.path is not None and model.revision is not None:
        problems.add((*path, "revision"), "only a model from the hub has one; remove it, or remove `path`")
    try:
        directory = model.path or plugins.resolve_base_model(model.source)
    except PluginError as error:
        problems.add(key, str(error))
        return None
    if directory is None:
        reference = HubReference.parse(model.source)
        if reference is None:
            problems.add(key, f"{model.name!r} is neither a directory nor a name that a model on the hub can have")
        elif is_offline():
            problems.add(key, offline_message(reference))
        return None
    directory = directory.expanduser().absolute()
    if not directory.is_dir():
        problems.add(key, f"there is no directory {str(directory)!r}; give the Hugging Face directory of the model")
    elif not (directory / "config.json").is_file():
        problems.add(key, f"{str(directory)!r} holds no config.json; give the Hugging Face directory of the model")
    return directory
