"""Where settings come from: one YAML file, `TINSMITH_` variables, flags. Every value remembers its source.

Settings are kept flat, by key path: `("server", "port")`, `("models", 0, "name")`. A value from a later layer replaces
every earlier one at, above or below its path.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple

import yaml
from yaml.parser import ParserError
from yaml.scanner import ScannerError

from tinsmith.errors import ConfigError

ENV_PREFIX: Final = "TINSMITH_"
ENV_NESTING: Final = "__"
CONFIG_VARIABLE: Final = "TINSMITH_CONFIG"

KeyPath = tuple[str | int, ...]


class Flag(NamedTuple):
    """A setting from the command line: its key, its text, and the option as typed."""

    key: str
    text: str
    option: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Given:
    """A value and its source. Containers occur only when empty."""

    value: object
    source: str  # "tinsmith.yaml:12", "TINSMITH_SERVER__PORT", "--port"


class Layers:
    """The settings given so far, lowest precedence first."""

    def __init__(self) -> None:
        self._given: dict[KeyPath, Given] = {}

    def put(self, path: KeyPath, given: Given) -> None:
        """Set one value, replacing everything at, below or above its path."""
        ancestors = {path[:length] for length in range(1, len(path))}
        for known in list(self._given):
            if known[: len(path)] == path or known in ancestors:
                del self._given[known]
        self._given[path] = given

    def put_tree(self, path: KeyPath, value: object, source: str) -> None:
        """Replace everything below `path` by a nested value."""
        self.put(path, Given(value=None, source=source))
        for inner, leaf in _leaves(value):
            self.put((*path, *inner), Given(value=leaf, source=source))

    def source_of(self, path: KeyPath) -> str | None:
        """Return where the value at the path comes from, else one below it, else one above it; None for a default."""
        for length in range(len(path), 0, -1):
            for known, given in self._given.items():
                if known[:length] == path[:length]:
                    return given.source
        return None

    def length_of(self, path: KeyPath) -> int:
        """Return how many entries of the list at the path are given."""
        depth = len(path)
        return len({known[depth] for known in self._given if known[:depth] == path and len(known) > depth})

    def tree(self) -> dict[str, Any]:
        """Return nested mappings and lists. Any: not validated yet."""
        root: dict[str | int, Any] = {}
        for path, given in self._given.items():
            node = root
            for key in path[:-1]:
                node = node.setdefault(key, {})
            node[path[-1]] = given.value
        return {str(key): _with_lists(value) for key, value in root.items()}


def read_file(layers: Layers, file: Path) -> None:
    """Add a YAML file. Raise ConfigError if it cannot be read, with the line of the mistake."""
    document = _document(file, "the configuration file")
    if document is None:
        return
    if not isinstance(document, yaml.MappingNode):
        msg = f"{file}:{document.start_mark.line + 1}: expected a mapping with keys such as 'server' and 'models'"
        raise ConfigError(msg)
    for path, given in _nodes(document, (), file) if document.value else ():
        layers.put(path, given)


def read_list(layers: Layers, file: Path, path: KeyPath, *, what: str) -> None:
    """Add the entries of a YAML file to a list. Raise ConfigError as `read_file` does."""
    document = _document(file, what)
    if document is None:
        return
    if not isinstance(document, yaml.SequenceNode):
        msg = f"{file}:{document.start_mark.line + 1}: expected a list, as in {format_key(path)}"
        raise ConfigError(msg)
    start = layers.length_of(path)
    for index, item in enumerate(document.value):
        for inner, given in _nodes(item, (*path, start + index), file):
            layers.put(inner, given)


def _document(file: Path, what: str) -> yaml.Node | None:
    try:
        return yaml.compose(file.read_text(encoding="utf-8"), Loader=yaml.SafeLoader)
    except OSError as error:
        msg = f"cannot read {what} {str(file)!r}: {error.strerror or error}"
        raise ConfigError(msg) from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(_not_yaml(file, error)) from error


def _not_yaml(file: Path, error: Exception) -> str:
    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark is not None:
        return f"{file}:{error.problem_mark.line + 1}: not valid YAML: {_without_content(error)}"
    reason = (
        f"byte {error.start} is not UTF-8" if isinstance(error, UnicodeDecodeError) else "a character is not allowed"
    )
    return f"{file}: not valid YAML: {reason}"


def _without_content(error: Exception) -> str:
    """Return what is wrong without the text in which it is: that may hold a secret."""
    if isinstance(error, ScannerError | ParserError):
        return error.problem or "it cannot be read"
    return "an alias, a tag or a value of this kind is not allowed here"


def read_environment(layers: Layers, environ: Mapping[str, str]) -> None:
    """Add every variable that names a key, such as TINSMITH_SERVER__PORT for server.port. Ignore all others."""
    for name, text in sorted(environ.items()):
        path = environment_path(name)
        if path is not None and (len(path) > 1 or text.lstrip().startswith(("[", "{"))):
            layers.put_tree(path, parse_text(text, source=name), name)


def environment_path(name: str) -> KeyPath | None:
    """Return the key path that a variable names, or None if it is not one of ours."""
    if not name.startswith(ENV_PREFIX) or name == CONFIG_VARIABLE:
        return None
    return tuple(_segment(part.lower()) for part in name.removeprefix(ENV_PREFIX).split(ENV_NESTING))


def read_flags(layers: Layers, flags: Iterable[Flag]) -> None:
    """Add flags; the last one of a key wins."""
    for key, text, option in flags:
        source = option or f"--{key}"
        layers.put_tree(parse_key(key), parse_text(text, source=source), source)


def parse_key(key: str) -> KeyPath:
    return tuple(_segment(part) for part in key.split("."))


def format_key(path: KeyPath) -> str:
    return ".".join(str(part) for part in path)


def parse_text(text: str, *, source: str = "") -> object:
    """Parse the text of a flag or variable: YAML for lists, mappings and null, otherwise the text itself."""
    if text.strip() == "null":
        return None
    if not text.lstrip().startswith(("[", "{")):
        return text
    try:
        return yaml.safe_load(text)
    except (yaml.YAMLError, ValueError) as error:
        mark = getattr(error, "problem_mark", None)
        where = f" at character {mark.index + 1}" if mark is not None else ""
        msg = f"{source}: not valid YAML or JSON{where}: {_without_content(error)}"
        raise ConfigError(msg) from error


def _segment(part: str) -> str | int:
    return int(part) if part.isdecimal() else part


def _leaves(value: object) -> Iterator[tuple[KeyPath, object]]:
    items: Iterable[tuple[Any, Any]]
    match value:
        case dict() if value:
            items = value.items()
        case list() if value:
            items = enumerate(value)
        case _:
            yield (), value
            return
    for key, inner in items:
        for path, leaf in _leaves(inner):
            yield (key, *path), leaf


def _nodes(
    node: yaml.Node, path: KeyPath, file: Path, above: tuple[yaml.Node, ...] = ()
) -> Iterator[tuple[KeyPath, Given]]:
    line = f"{file}:{node.start_mark.line + 1}"
    if any(node is each for each in above):
        msg = f"{line}: {format_key(path)} is an alias of a value that contains it; write its value out"
        raise ConfigError(msg)
    above = (*above, node)
    if isinstance(node, yaml.MappingNode) and node.value:
        seen: dict[str, int] = {}
        for key_node, value_node in node.value:
            key = str(key_node.value)
            key_line = key_node.start_mark.line + 1
            if key in seen:
                msg = f"{file}:{key_line}: {format_key((*path, key))} is already set in line {seen[key]}; keep one"
                raise ConfigError(msg)
            seen[key] = key_line
            yield from _nodes(value_node, (*path, key), file, above)
    elif isinstance(node, yaml.SequenceNode) and node.value:
        for index, item in enumerate(node.value):
            yield from _nodes(item, (*path, index), file, above)
    else:
        yield path, Given(value=_scalar(node, line), source=line)


def _scalar(node: yaml.Node, line: str) -> object:
    loader = yaml.SafeLoader("")
    try:
        return loader.construct_document(node)
    except (yaml.YAMLError, ValueError) as error:
        msg = f"{line}: not valid YAML: {_without_content(error)}"
        raise ConfigError(msg) from None
    finally:
        loader.dispose()


def _with_lists(node: object) -> object:
    """Turn mappings with the keys 0, 1, ... into lists. One with a gap stays a mapping and fails validation."""
    if not isinstance(node, dict):
        return node
    values = {key: _with_lists(value) for key, value in node.items()}
    if values and set(values) == set(range(len(values))):
        return [values[index] for index in range(len(values))]
    return values
