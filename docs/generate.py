"""Write the generated parts of the pages: settings, commands, hooks, failpoints, protocol fields, packages.

A generated part stands between `<!-- generated: NAME -->` and `<!-- end -->`. `make fix` runs this file, and a test
compares its output with the pages.
"""

import ast
import importlib.util
import inspect
import json
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cache, partial
from itertools import groupby
from pathlib import Path
from typing import Any

import client_fields
import conformance_cards
import field_status
import file_fields
import sdk_versions
import syntax_trees
import typer
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from tinsmith import hookspecs
from tinsmith.backend import SamplerCapabilities, TrainerCapabilities
from tinsmith.commands.cli import build_group
from tinsmith.commands.load_settings import load_settings
from tinsmith.errors import ConfigError
from tinsmith.failpoints import BOUNDARIES
from tinsmith.placement.machine import Machine
from tinsmith.placement.placing import Placed
from tinsmith.placement.plan import make_plan
from tinsmith.placement.report import described, memory_rows
from tinsmith.plugins.discovery import HOOK_NAMES
from tinsmith.plugins.loading import Plugins
from tinsmith.ranges import TTL_SECONDS, sampling_ranges, training_ranges
from tinsmith.settings import DeviceSettings, ModelSettings, PluginSection, Settings
from tinsmith.settings.sources import Flag
from tinsmith_jax.families import built_in
from tinsmith_workbench.pages import generators
from tinsmith_workbench.plugin import tinsmith_register_commands as add_workbench
from tinsmith_workers.plugin import tinsmith_register_commands as add_worker

DOCS = Path(__file__).parent
REFERENCE = DOCS / "reference"
CORE = DOCS.parent / "core" / "tinsmith"
LIBRARIES = tuple(sorted(DOCS.parent.glob("libraries/*/tinsmith_*")))
BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
PUBLIC_PACKAGES = (
    "tinsmith",
    "tinsmith.stores",
    "tinsmith.tables",
    "tinsmith.command_line",
    "tinsmith.testing",
    "tinsmith.machine",
    "tinsmith.logins",
    "tinsmith.tracing",
    "tinsmith_checkpoints.huggingface",
    "tinsmith_workers",
    "tinsmith_workers.torch",
    "tinsmith_workers.testing",
)
_LONGEST_ALIAS = 80


def main() -> None:
    for page in sorted(DOCS.rglob("*.md")):
        page.write_text(regenerated(page.read_text(encoding="utf-8")), encoding="utf-8")


def regenerated(text: str) -> str:
    """Return the page with its generated parts brought up to date."""

    def replace(match: re.Match[str]) -> str:
        name = match.group(1)
        return f"<!-- generated: {name} -->\n{GENERATORS[name]()}\n<!-- end -->"

    return re.sub(r"<!-- generated: ([\w.-]+) -->\n(?:.*?\n)??<!-- end -->", replace, text, flags=re.DOTALL)


def settings_tables() -> str:
    """Return one table for each section of the configuration file."""
    parts = []
    for section, keys in groupby(setting_keys(Settings), key=lambda item: re.split(r"\W", item[0])[0]):
        parts.append(f"### `{section}`\n\n" + _table("Key", [(f"`{key}`", *_described(field)) for key, field in keys]))
    return "\n\n".join(parts)


def setting_keys(model: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, FieldInfo]]:
    """Yield every key that has a value of its own; of plugin sections `plugin` alone. Items of lists are `models[]`."""
    for name, field in model.model_fields.items():
        nested = _nested(field.annotation)
        if nested is None or _is_mapping(field.annotation):
            yield f"{prefix}{name}", field
        elif nested is PluginSection:
            yield f"{prefix}{name}.plugin", _of_section(field)
            if prefix.startswith("models"):
                yield from setting_keys(DeviceSettings, f"{prefix}{name}.")
        else:
            yield from setting_keys(nested, f"{prefix}{name}{'[]' if _is_list(field.annotation) else ''}.")


def plugin_tables() -> str:
    """Return the options of the core's own offers; other distributions document theirs."""
    plugins = Plugins.load()
    offers = (
        ("store", plugins.stores.all()),
        ("scheduler", plugins.schedulers.all()),
        ("backend", plugins.backends.all()),
    )
    return "\n\n".join(
        _plugin_section(kind, name, spec)
        for kind, specs in offers
        for name, spec in specs.items()
        if spec.config.__module__.startswith("tinsmith.")
    )


def _plugin_section(kind: str, name: str, spec: Any) -> str:
    rows = [(f"`{key}`", *_described(field)) for key, field in spec.config.model_fields.items()]
    options = _table("Key", rows) if rows else "No options."
    return f"### {kind} `{name}`\n\n{spec.description[:1].upper()}{spec.description[1:]}.\n\n{options}"


def command_tables() -> str:
    """Return every built-in command with its arguments and options."""
    return "\n\n".join(
        _command_section(name, command)
        for name, command in _commands(typer.main.get_command(build_group(Plugins.load())))
        if command.callback.__module__.startswith("tinsmith.")
    )


def commands_of(add: Callable[[typer.Typer], None]) -> str:
    """Return the commands that a plugin adds."""
    group = typer.Typer()
    group.callback()(lambda: None)  # or one command would be the whole group
    add(group)
    return "\n\n".join(_command_section(*each, "###") for each in _commands(typer.main.get_command(group)))


def conformance_checks() -> str:
    """Return what `tinsmith-conformance` checks. It is read where it lies: it may not be installed."""
    sys.path.insert(0, str(DOCS.parent / "tools" / "conformance"))
    from tinsmith_conformance.checks import GROUPS

    parts = [f"{sum(len(group.checks) for group in GROUPS)} checks in {len(GROUPS)} groups."]
    for group in GROUPS:
        rows = [(check.name, check.title, check.meaning) for check in group.checks]
        lines = ["| Check | What it tests | What its failure means |", "|---|---|---|"]
        lines += [f"| {' | '.join(each.replace('|', chr(92) + '|') for each in row)} |" for row in rows]
        parts.append(f"### {group.name}\n\n{group.about}\n\n" + "\n".join(lines))
    return "\n\n".join(parts)


_MACHINES = (("one card", "one-card", 1), ("eight cards, split", "eight-cards", 8))
_MACHINES += (("eight cards, colocated", "eight-cards-colocated", 8), ("two nodes of eight cards", "two-nodes", 8))
_MODELS = ("Qwen3-8B", "Qwen3-32B", "Llama-3-70B", "Qwen3-32B-W8A16", "Llama-3-70B-W8A16")
_JAX_MACHINES: tuple[tuple[int, str, dict[str, int]], ...] = (
    (1, "Qwen3-8B", {}),
    (1, "Qwen3-32B", {}),
    (8, "Qwen3-8B", {"fsdp": 8}),
    (8, "Qwen3-32B", {"fsdp": 8}),
    (8, "Qwen3-32B", {"fsdp": 4, "tensor": 2}),
    (8, "Llama-3-70B", {"fsdp": 4, "tensor": 2}),
)
_TENANTS = 16


def what_fits() -> str:
    """Return what there is room for on the usual machines."""
    rows = [
        "| Machine | Model | Trainer | Tokens in a micro-batch | Tenants | Sampler | Keys and values |",
        "|" + "---|" * 7,
    ]
    for machine, name, cards in _MACHINES:
        rows += [f"| {machine} | {model} | {' | '.join(_fitting(name, model, cards))} |" for model in _MODELS]
    return "\n".join(rows)


def _fitting(name: str, model: str, cards: int) -> tuple[str, ...]:
    try:
        trainer, sampler = _planned(name, model, cards)
    except ConfigError as error:
        reason = str(error).rpartition("; ")[2]
        return (f"does not fit: {reason}", "", "", "", "")
    models = trainer.demand.max_models
    assert models is not None
    return (
        trainer.demand.layout,
        f"{trainer.demand.batch_tokens:,}",
        f"{min(models, _TENANTS)} of {_TENANTS}",
        sampler.demand.layout,
        f"{sampler.demand.batch_tokens * sampler.demand.replicas:,}",
    )


def what_fits_with_jax() -> str:
    """Return what there is room for if the jax backend trains and samples."""
    rows = ["| Cards | Model | Mesh | Tokens in a micro-batch | Tenants | GiB of each card |", "|" + "---|" * 6]
    return "\n".join([*rows, *(f"| {' | '.join(_fitting_with_jax(*each))} |" for each in _JAX_MACHINES)])


def _fitting_with_jax(cards: int, model: str, mesh: Mapping[str, int]) -> tuple[str, ...]:
    divided = ", ".join(f"`{axis}: {size}`" for axis, size in mesh.items()) or "none"
    backend = {"plugin": "jax", **({"mesh": mesh} if mesh else {})}
    settings = Settings(models=(ModelSettings.model_validate({"name": model, "backend": backend}),))
    try:
        (trainer,) = make_plan(settings, Plugins.load(), _machine(cards), [model])
    except ConfigError as error:
        needed = str(error).partition("needs at least ")[2].partition(":")[0]
        return str(cards), model, divided, f"does not fit: needs {needed}", "", ""
    models = trainer.demand.max_models
    assert models is not None
    rows = memory_rows(trainer, _TENANTS)
    return (
        str(cards),
        model,
        divided,
        f"{trainer.demand.batch_tokens:,}",
        f"{min(models, _TENANTS)} of {_TENANTS}",
        "; ".join(f"{name} {size / 2**30:.1f}" for name, size in rows),
    )


def plan_in_full() -> str:
    name, model, cards = "one-card", "Qwen3-8B", 1
    lines = described(_planned(name, model, cards), _machine(cards), tenants=_TENANTS)
    return "```console\n" + "\n".join(lines) + "\n```"


def _planned(name: str, model: str, cards: int) -> list[Placed]:
    file = REFERENCE.parents[1] / "deploy" / "gpus" / f"{name}.yaml"
    flags = [Flag("models.0.name", model)]
    plugins = Plugins.load()
    settings = load_settings(plugins, file=file, environ={}, flags=flags, needs_models=False)
    return make_plan(settings, plugins, _machine(cards), [model])


def _machine(cards: int) -> Machine:
    return Machine(devices=tuple(map(str, range(cards))), device_bytes=80 << 30, others_alike=True)


def model_families() -> str:
    return "\n".join(f"- `{name}`" for name in built_in())


def range_table() -> str:
    """Return the range of every number of a request, for a backend that can do everything."""
    trainer = TrainerCapabilities(vocab_size=1, max_context_tokens=1, max_batch_tokens=1, full_fine_tuning=True)
    sampler = SamplerCapabilities(vocab_size=1, max_context_tokens=1)
    ranges = {**training_ranges(trainer), **sampling_ranges(sampler), "ttl_seconds": TTL_SECONDS}
    rows = ["| Number | Allowed |", "|---|---|"]
    return "\n".join([*rows, *(f"| `{name}` | {each.described()} |" for name, each in ranges.items())])


def failpoint_table() -> str:
    rows = ["| Boundary | What it is |", "|---|---|"]
    return "\n".join([*rows, *(f"| `{name}` | {what} |" for name, what in BOUNDARIES.items())])


def package_table() -> str:
    """Return every package of core, libraries, plugins and tools, with the first paragraph of its docstring."""
    rows = ["| Package | Subject |", "|---|---|"]
    others = (DOCS.parent.glob(f"{folder}/*/tinsmith_*") for folder in ("plugins", "tools"))
    roots = [CORE, *LIBRARIES, *sorted(root for each in others for root in each if root.is_dir())]
    found = ((root.parent, file) for root in roots for file in sorted(root.rglob("__init__.py")))
    for root, file in found:
        name = ".".join(file.parent.relative_to(root).parts)
        if "migrations" not in name:  # Alembic's folders
            doc = ast.get_docstring(syntax_trees.tree_of(file))
            assert doc is not None, f"{name} has no docstring"
            rows.append(f"| `{name}` | {' '.join(doc.partition(chr(10) * 2)[0].split()).rstrip('.')} |")
    return "\n".join(rows)


def public_counts() -> str:
    """Return how many names each public module exports."""
    counts = {package: len(_exported(package)) for package in PUBLIC_PACKAGES}
    rows = ["| Module | Names |", "|---|---|", *(f"| `{package}` | {count} |" for package, count in counts.items())]
    return "\n".join([*rows, f"| together | {len({name for each in PUBLIC_PACKAGES for name in _exported(each)})} |"])


def public_names(package: str) -> str:
    """Return what a package exports, by the module that defines it, with the first lines of the docstrings."""
    sections: dict[str, list[str]] = {}
    for name in _exported(package):
        module, doc = _definition(package, name)
        first = doc.partition("\n")[0].replace("|", "\\|")
        sections.setdefault(module, []).append(f"| `{name}` | {first} |")
    return "\n\n".join(
        f"### `{module}`\n\n" + "\n".join(["| Name | What it is |", "|---|---|", *rows])
        for module, rows in sorted(sections.items())
    )


def _exported(package: str) -> list[str]:
    values = {
        ast.unparse(node.targets[0]): node.value for node in _source(package).body if isinstance(node, ast.Assign)
    }
    return [str(name) for name in ast.literal_eval(values["__all__"])]


def _definition(module: str, name: str) -> tuple[str, str]:
    """Return the module whose source defines a name, and the docstring that stands there, not an inherited one."""
    body = _source(module).body
    for node, following in zip(body, [*body[1:], None], strict=True):
        match node:
            case ast.ImportFrom(module=str(home)) if any(alias.name == name for alias in node.names):
                return _definition(home, name)
            case ast.ImportFrom(module=str(home), names=[ast.alias(name="*")]):
                with suppress(LookupError):
                    return _definition(home, name)
            case ast.ClassDef(name=defined) | ast.FunctionDef(name=defined) | ast.AsyncFunctionDef(name=defined) if (
                defined == name
            ):
                return module, ast.get_docstring(node) or ""
            case ast.Assign(targets=[ast.Name(id=defined)]) | ast.AnnAssign(target=ast.Name(id=defined)):
                if defined == name:
                    return module, _literal(following) or _alias(node.value)
            case _:
                pass
    msg = f"{module} does not define {name!r}"
    raise LookupError(msg)


def _literal(node: ast.stmt | None) -> str:
    """Return the docstring of the assignment that it follows."""
    match node:
        case ast.Expr(value=ast.Constant(value=str(doc))):
            return inspect.cleandoc(doc)
        case _:
            return ""


def _alias(value: ast.expr | None) -> str:
    text = ast.unparse(value) if value is not None else ""
    return f"`{text}`" if len(text) <= _LONGEST_ALIAS else ""


@cache
def _source(module: str) -> ast.Module:
    """Return the parsed source, for which nothing is imported: neither torch nor anybody's plugins."""
    root = next((each for each in LIBRARIES if module.startswith(each.name)), CORE)
    path = root.parent.joinpath(*module.split("."))
    file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    return syntax_trees.tree_of(file)


def _commands(group: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from _commands(command, f"{prefix}{name} ")
        else:
            yield f"{prefix}{name}", command


def _command_section(name: str, command: Any, level: str = "##") -> str:
    parameters = [each for each in command.params if each.name != "help"]
    parts = [f"{level} `tinsmith {name}`", _usage(name, parameters), " ".join((command.help or "").split())]
    if parameters:
        parts.append(_table("Option", [_parameter(each) for each in parameters]))
    return "\n\n".join(parts)


def _usage(name: str, parameters: Sequence[Any]) -> str:
    arguments = [each for each in parameters if each.param_type_name == "argument"]
    options = [each for each in parameters if each.param_type_name == "option"]
    words = ["$ tinsmith", name]
    words += [each.name.upper() if each.required else f"[{each.name.upper()}]" for each in arguments]
    words += [f"{each.opts[0]} {each.name.upper()}" for each in options if each.required]
    words += ["[OPTIONS]"] if any(not each.required for each in options) else []
    return f"```console\n{' '.join(words)}\n```"


def _parameter(parameter: Any) -> tuple[str, str, str]:
    meaning = parameter.help or ""
    if parameter.param_type_name == "argument":
        return f"`{parameter.name.upper()}`", "required" if parameter.required else "", meaning
    names = ", ".join(f"`{name}`" for name in (*parameter.opts, *parameter.secondary_opts))
    default = "required" if parameter.required else "" if parameter.default is None else f"`{parameter.default}`"
    return names, default, meaning


def _table(first: str, rows: Iterable[tuple[str, str, str]]) -> str:
    lines = [f"| {first} | Default | Meaning |", "|---|---|---|"]
    return "\n".join([*lines, *(f"| {name} | {default} | {meaning} |" for name, default, meaning in rows)])


def _described(field: FieldInfo) -> tuple[str, str]:
    """Return a setting's default and its meaning."""
    return _default(field), field.description or ""


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


def _nested(annotation: Any) -> type[BaseModel] | None:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next(filter(None, map(_nested, getattr(annotation, "__args__", ()))), None)


def _is_mapping(annotation: Any) -> bool:
    return getattr(annotation, "__origin__", None) is dict


def _is_list(annotation: Any) -> bool:
    return getattr(annotation, "__origin__", None) in (list, tuple)


def hook_section(name: str) -> str:
    """Return a hook's signature and the docstring of its specification."""
    specification = getattr(hookspecs, name)
    [function] = syntax_trees.parse(inspect.getsource(specification)).body
    assert isinstance(function, ast.FunctionDef)
    assert function.returns is not None
    signature = f"def {name}({ast.unparse(function.args)}) -> {ast.unparse(function.returns)}"
    return f"```python\n{signature}\n```\n\n{inspect.getdoc(specification)}"


def measured(figures: str, page: str, otherwise: str = "No run on an idle machine has been published yet.") -> str:
    """Return what a program in benchmarks/ measured, as its page module renders it; the page itself says how."""
    found = REFERENCE / figures
    if not found.is_file():
        return otherwise
    spec = importlib.util.spec_from_file_location(Path(page).name, BENCHMARKS / f"{page}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    rendered: str = module.render(json.loads(found.read_text(encoding="utf-8")))
    return rendered


GENERATORS: dict[str, Callable[[], str]] = {
    "conformance": conformance_checks,
    "conformance-cards": conformance_cards.markdown,
    "settings": settings_tables,
    "plugin-options": plugin_tables,
    "commands": command_tables,
    "workers-commands": partial(commands_of, add_worker),
    "workbench-commands": partial(commands_of, add_workbench),
    "comparison": partial(measured, "comparison.json", "comparison/page"),
    "sdk-versions": sdk_versions.markdown,
    "where-time-goes": partial(measured, "where-time-goes.json", "comparison/split_page"),
    "models": partial(measured, "models.json", "matrix/page", "No model was tried yet."),
    "cookbook": partial(measured, "cookbook.json", "cookbook/page", "Nothing was run yet."),
    "gpu": partial(measured, "gpu.json", "gpu_parts/page", "Nothing was measured on a GPU yet."),
    "failpoints": failpoint_table,
    "packages": package_table,
    "plans": what_fits,
    "plans-jax": what_fits_with_jax,
    "plan-in-full": plan_in_full,
    "fields": field_status.markdown,
    "refusals": field_status.refused_lines,
    **{f"fields-{name}": partial(file_fields.markdown, table) for name, table in file_fields.TABLES.items()},
    **{f"client-fields-{name}": partial(client_fields.markdown, each) for name, each in client_fields.TABLES.items()},
    "fields-jax-families": file_fields.jax_families,
    "fields-megatron-families": file_fields.megatron_families,
    "ranges": range_table,
    "model-families": model_families,
    **generators(REFERENCE),
    "public-counts": public_counts,
    **{f"public-{package}": partial(public_names, package) for package in PUBLIC_PACKAGES},
    **{f"hook-{name}": partial(hook_section, name) for name in HOOK_NAMES},
}

if __name__ == "__main__":
    sys.exit(main())
