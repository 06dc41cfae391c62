"""Write the generated parts of the reference: settings, command line, hooks. `make fix` runs it; a test compares.

A generated part stands between `<!-- generated: NAME -->` and `<!-- end -->`.
"""

import ast
import inspect
import re
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import click
import typer
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from tinsmith import hookspecs
from tinsmith.commands.cli import build_group
from tinsmith.failpoints import BOUNDARIES
from tinsmith.plugins.hook_caller import HOOK_NAMES
from tinsmith.plugins.loading import Plugins
from tinsmith.settings import PluginSection, Settings

REFERENCE = Path(__file__).parent / "reference"


def main() -> None:
    for page in sorted(REFERENCE.glob("*.md")):
        page.write_text(regenerated(page.read_text(encoding="utf-8")), encoding="utf-8")


def regenerated(text: str) -> str:
    """Return a page with its generated parts made anew."""

    def replace(match: re.Match[str]) -> str:
        name = match.group(1)
        return f"<!-- generated: {name} -->\n{GENERATORS[name]()}\n<!-- end -->"

    return re.sub(r"<!-- generated: ([\w-]+) -->\n.*?\n<!-- end -->", replace, text, flags=re.DOTALL)


def settings_table() -> str:
    rows = ["| Key | Default | Meaning |", "|---|---|---|"]
    rows += [f"| `{key}` | {_default(field)} | {field.description or ''} |" for key, field in setting_keys(Settings)]
    return "\n".join(rows)


def setting_keys(model: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, FieldInfo]]:
    """Yield every key with a value of its own; list items are `models[]`, plugin sections have `plugin` alone."""
    for name, field in model.model_fields.items():
        nested = _nested(field.annotation)
        if nested is None:
            yield f"{prefix}{name}", field
        elif nested is PluginSection:
            yield f"{prefix}{name}.plugin", _of_section(field)
        else:
            yield from setting_keys(nested, f"{prefix}{name}{'[]' if _is_list(field.annotation) else ''}.")


def plugin_tables() -> str:
    """Return the options of core's own offers."""
    plugins = Plugins.load()
    parts = []
    for kind, specs in (
        ("store", plugins.stores.unambiguous()),
        ("scheduler", plugins.schedulers.unambiguous()),
        ("backend", plugins.backends.unambiguous()),
    ):
        for name, spec in specs.items():
            if not spec.config.__module__.startswith("tinsmith."):
                continue  # its own distribution documents it
            parts.append(f"### {kind} `{name}`\n\n{spec.description[:1].upper()}{spec.description[1:]}.\n")
            rows = [
                f"| `{key}` | {_default(field)} | {field.description or ''} |"
                for key, field in spec.config.model_fields.items()
            ]
            parts.append(
                "\n".join(["| Key | Default | Meaning |", "|---|---|---|", *rows]) + "\n" if rows else "No options.\n"
            )
    return "\n".join(parts).rstrip()


def command_tables() -> str:
    """Return every built-in command with its arguments and options."""
    group = typer.main.get_command(build_group(Plugins.load()))
    assert isinstance(group, click.Group) or hasattr(group, "commands")
    parts = []
    for name, command in _commands(group):
        parts.append(f"## `tinsmith {name}`\n\n{' '.join((command.help or '').split())}\n")
        rows = [_option(parameter) for parameter in command.params if parameter.name != "help"]
        if rows:
            parts.append("\n".join(["| Option | Default | Meaning |", "|---|---|---|", *rows]) + "\n")
    return "\n".join(parts).rstrip()


def failpoint_table() -> str:
    rows = ["| Boundary | What it is |", "|---|---|"]
    return "\n".join([*rows, *(f"| `{name}` | {what} |" for name, what in BOUNDARIES.items())])


def _commands(group: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:  # Any: typer's click
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from _commands(command, f"{prefix}{name} ")
        else:
            yield f"{prefix}{name}", command


def _option(parameter: Any) -> str:  # Any: typer's click
    if parameter.param_type_name == "argument":
        return f"| `{parameter.name.upper()}` | | {parameter.help or ''} |"
    names = ", ".join(f"`{name}`" for name in (*parameter.opts, *parameter.secondary_opts))
    default = "" if parameter.default is None else f"`{parameter.default}`"
    return f"| {names} | {default} | {parameter.help or ''} |"


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    value = field.get_default(call_default_factory=True)
    if value is None or value == ():
        return "none"
    return f"`{value}`"


def _of_section(field: FieldInfo) -> FieldInfo:
    """Return the `plugin` field of a section, with the section's own default and description."""
    default = field.get_default(call_default_factory=True)
    description = field.description or PluginSection.model_fields["plugin"].description
    if isinstance(default, PluginSection):
        return FieldInfo(annotation=str, default=default.plugin, description=description)
    return FieldInfo(annotation=str, default=None, description=description)


def _nested(annotation: Any) -> type[BaseModel] | None:  # Any: a type expression
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next(filter(None, map(_nested, getattr(annotation, "__args__", ()))), None)


def _is_list(annotation: Any) -> bool:  # Any: a type expression
    return getattr(annotation, "__origin__", None) in (list, tuple)


def hook_section(name: str) -> str:
    """Return a hook's signature and what its specification says."""
    specification = getattr(hookspecs, name)
    [function] = ast.parse(inspect.getsource(specification)).body
    assert isinstance(function, ast.FunctionDef)
    assert function.returns is not None
    signature = f"def {name}({ast.unparse(function.args)}) -> {ast.unparse(function.returns)}"
    return f"```python\n{signature}\n```\n\n{inspect.getdoc(specification)}"


GENERATORS: dict[str, Callable[[], str]] = {
    "settings": settings_table,
    "plugin-options": plugin_tables,
    "commands": command_tables,
    "failpoints": failpoint_table,
    **{f"hook-{name}": partial(hook_section, name) for name in HOOK_NAMES},
}

if __name__ == "__main__":
    sys.exit(main())
