"""The command `tinsmith doctor`."""

from __future__ import annotations

import json as json_format
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, replace
from typing import Annotated, Final

import typer
from rich.table import Table

from tinsmith.commands.doctor.machine import Finding, check_data_directory, check_installation, check_port
from tinsmith.commands.doctor.models import check_backends, check_gpus, check_hub, check_model, check_sampler
from tinsmith.commands.options import (
    AsJson,
    Backend,
    BaseModel,
    ConfigFile,
    DataDir,
    ModelAndSettings,
    plugins_of,
    settings_of,
)
from tinsmith.errors import ConfigError
from tinsmith.placement.machine import this_machine
from tinsmith.plugins.loading import Plugins
from tinsmith.processes.before_start import look_at_store, obstacles
from tinsmith.processes.logs import console, escape, escape_lines
from tinsmith.settings import Settings
from tinsmith.settings.secrets import cleaned

_UNHEALTHY: Final = 1
_COLOURS: Final = {"ok": "green", "note": "yellow", "problem": "red"}


def doctor(
    context: typer.Context,
    model: ModelAndSettings = None,
    config: ConfigFile = None,
    base_model: BaseModel = None,
    backend: Backend = None,
    port: Annotated[int | None, typer.Option(help="TCP port that the server would listen on")] = None,
    data_dir: DataDir = None,
    json: AsJson = False,
) -> None:
    """Check the installation, this machine and the configuration, and say what to do about each problem."""
    plugins = plugins_of(context)

    def load(*, needs_models: bool) -> Settings:
        return settings_of(
            context,
            config,
            ("--port", "server.port", port),
            ("--data-dir", "server.data_dir", data_dir),
            arguments=model,
            base_model=base_model,
            backend=backend,
            needs_models=needs_models,
        )

    findings = [replace(each, found=cleaned(each.found)) for each in _examine(plugins, load)]  # some quote others
    (_print_json if json else _print_table)(findings)
    if any(finding.status == "problem" for finding in findings):
        raise typer.Exit(_UNHEALTHY)


def _examine(plugins: Plugins, load: Callable[..., Settings]) -> Iterator[Finding]:
    yield from check_installation(plugins)
    settings, finding = _load(load)
    yield finding
    if settings is None:
        return
    found = obstacles(settings, plugins)
    reasons = {each.check: each.reason for each in found}
    yield check_port(settings.server, reasons.get("port"))
    if "data directory" not in reasons:
        yield from check_data_directory(settings.data_dir, with_database=_holds_database(settings))
    if "database" not in reasons and (told := look_at_store(settings, plugins)) is not None:
        yield Finding("database", "ok", told)
    yield from (Finding(each.check, "problem", each.reason) for each in found if each.check != "port")
    yield check_hub()
    machine = this_machine()
    yield check_gpus(machine)
    if not settings.models:
        yield from check_backends(plugins, machine)
    for model in settings.models if finding.status == "ok" else ():
        yield from check_model(model, plugins, machine)
        yield from check_sampler(model, plugins, machine)


def _holds_database(settings: Settings) -> bool:
    return settings.store.plugin == "sql" and settings.store.options().get("url") is None


def _load(load: Callable[..., Settings]) -> tuple[Settings | None, Finding]:
    """Return the settings, as far as they can be read, and the findings about them."""
    try:
        settings = load(needs_models=False)
    except ConfigError as error:
        return None, Finding("configuration", "problem", str(error), "port, data directory and models were not checked")
    if not settings.models:
        remedy = "name one: `tinsmith doctor MODEL`, or --config FILE"
        return settings, Finding("configuration", "note", "no model to check", remedy)
    try:
        settings = load(needs_models=True)
    except ConfigError as error:
        return settings, Finding("configuration", "problem", str(error), "the models were not checked")
    return settings, Finding("configuration", "ok", f"valid, models: {len(settings.models)}")


def _print_json(findings: Sequence[Finding]) -> None:
    healthy = all(finding.status != "problem" for finding in findings)
    typer.echo(json_format.dumps({"healthy": healthy, "findings": [asdict(finding) for finding in findings]}, indent=2))


def _print_table(findings: Iterable[Finding]) -> None:
    table = Table(box=None, pad_edge=False, show_header=False, padding=(0, 2, 0, 0))
    shown = ""
    for finding in findings:
        told = escape_lines(finding.found)
        if finding.remedy:
            told += f"\n[bold]{escape_lines(finding.remedy)}[/]"
        subject = "" if finding.subject == shown else finding.subject
        table.add_row(f"[{_COLOURS[finding.status]}]{finding.status}[/]", escape(subject), told)
        shown = finding.subject
    terminal = console()
    terminal.print(table)
    problems = sum(finding.status == "problem" for finding in findings)
    terminal.print(f"\nproblems: {problems}" if problems else "\nhealthy")
