"""`tinsmith plugins`, `new-plugin` and `check-plugin`: lists plugins, starts new ones, and tests them."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Final

import typer
import yaml
from rich.console import Console
from rich.table import Table

from tinsmith.authoring.check_plugin import (
    CheckReport,
    Finding,
    Offered,
    Outcome,
    Progress,
    as_json,
    check_plugin,
    claims,
)
from tinsmith.authoring.new_plugin import PluginKind, write_plugin
from tinsmith.commands.options import AsJson, plugins_of
from tinsmith.errors import UserError
from tinsmith.plugins.loading import Plugins
from tinsmith.processes.logs import console, escape, escape_lines, printable_lines

_FAILED: Final = 1
_COLOURS: Final[Mapping[Outcome, str]] = {"passed": "green", "skipped": "yellow", "failed": "red"}

PluginName = Annotated[str, typer.Argument(metavar="NAME", help="name of the plugin; `tinsmith plugins` lists them")]


def add_plugin_commands(group: typer.Typer) -> None:
    group.command("plugins")(list_plugins)
    group.command("new-plugin")(new_plugin)
    group.command("check-plugin")(check)


def list_plugins(context: typer.Context) -> None:
    """List all plugins: origin, version, offers, and the error of each broken one."""
    table = Table("plugin", "distribution", "version", "offers", box=None, pad_edge=False, header_style="bold")
    rows = plugins_of(context).report()
    for row in rows:
        offers = ", ".join(row.offers) or "-"
        name, shown = (
            (f"[red]{escape(row.name)}[/]", f"[red]{escape_lines(row.error)}[/]")
            if row.error
            else (escape(row.name), "")
        )
        told = "\n".join(part for part in (escape(offers) if row.offers or not row.error else "", shown) if part)
        table.add_row(name, escape(row.distribution), escape(row.version), told)
    console().print(table, highlight=False)


def new_plugin(
    context: typer.Context,
    name: Annotated[str, typer.Argument(metavar="NAME", help="lower case, with dashes; configurations use it")],
    kind: Annotated[PluginKind, typer.Option(help="kind of the plugin's offer")],
    directory: Annotated[Path | None, typer.Option(help="directory to write; default: tinsmith-NAME")] = None,
) -> None:
    """Write a working plugin that passes its contract suite, as a starting point."""
    root = write_plugin(name, kind, directory, installed=plugins_of(context).report())
    terminal = console()
    terminal.print(f"wrote a {kind} to {escape(str(root))}; next:\n", highlight=False)
    for line in (f"cd {root}", 'pip install -e ".[test]"', "pytest", f"tinsmith check-plugin {name.replace('_', '-')}"):
        terminal.print(f"    {line}", markup=False, highlight=False, soft_wrap=True)


def check(
    context: typer.Context,
    name: PluginName,
    option: Annotated[
        list[str] | None, typer.Option(metavar="KEY=VALUE", help="option of the plugin's offer; may be repeated")
    ] = None,
    trainer: Annotated[str | None, typer.Option(help="backend whose adapters the plugin's sampler loads")] = None,
    traceback: Annotated[bool, typer.Option("--traceback", help="print full tracebacks of failures")] = False,
    json: AsJson = False,
) -> None:
    """Run the contract suites on all offers of a plugin, and report the results by topic."""
    plugins = plugins_of(context)
    offers = plugins.offers_of(name)
    if trainer is not None:
        plugins.backends.get(trainer)  # raises PluginError if there is none
    with _progress() as progress:
        report = check_plugin(name, offers, options=_options(option or []), trainer=trainer, progress=progress)
    if json:
        typer.echo(as_json(report))
    else:
        _print_report(console(), name, plugins, report, whole=traceback)
    if report.num("failed"):
        raise typer.Exit(_FAILED)


def _print_report(console: Console, name: str, plugins: Plugins, report: CheckReport, *, whole: bool) -> None:
    for row in plugins.report():
        if row.name == name:
            origin = f"{row.distribution} {row.version}"
            console.print(f"[bold]plugin {escape(row.name)}[/] of {escape(origin)}", soft_wrap=True)
    if not report.findings:
        console.print("it offers nothing that has a contract suite")
        return
    for offer in dict.fromkeys(finding.offer for finding in report.findings):
        console.print(f"\n[bold]{escape(str(offer))}[/]")
        _print_claims(console, report, offer)
        table = Table(box=None, pad_edge=False, show_header=False, padding=(0, 2, 0, 0))
        findings = [finding for finding in report.findings if finding.offer == offer]
        for area in dict.fromkeys(finding.area for finding in findings):
            rows = _summary([finding for finding in findings if finding.area == area])
            for number, (outcome, told) in enumerate(rows):
                table.add_row("" if number else f"  {area}", f"[{_COLOURS[outcome]}]{outcome}[/]", escape_lines(told))
        console.print(table)
        for finding in findings if whole else ():
            if finding.traceback:
                console.print(printable_lines(finding.traceback), markup=False)
    numbers = ", ".join(f"{report.num(outcome)} {outcome}" for outcome in _COLOURS)
    console.print(f"\n{numbers}")


def _print_claims(console: Console, report: CheckReport, offer: Offered) -> None:
    roles = report.capabilities.get(offer, {})
    for role, capabilities in roles.items():
        shown = ", ".join(f"{key} {_shown(value)}" for key, value in claims(capabilities).items() if value)
        console.print(f"  claims as a {role}: {escape(shown)}", soft_wrap=True)
    measured = report.isolation_difference.get(offer)
    if measured is not None:
        console.print(
            f"  isolation: {roles['trainer'].isolation} claimed; measured logprobs alone and in company differ by at "
            f"most {measured:.3g}"
        )
    for row in report.abuse.get(offer, ()):
        counts = ", ".join(f"{number} {what}" for what, number in row.items() if what != "group")
        console.print(f"  abuse, {escape(str(row['group']))}: {counts}")


def _shown(value: object) -> str:
    if isinstance(value, list):
        return "+".join(str(each) for each in value)
    return "yes" if value is True else str(value)


def _summary(findings: Sequence[Finding]) -> Iterator[tuple[Outcome, str]]:
    """Yield the number of tests that passed, the skipped ones by reason, and each that failed."""
    passed = sum(finding.outcome == "passed" for finding in findings)
    if passed:
        yield "passed", str(passed)
    skipped = [finding.reason for finding in findings if finding.outcome == "skipped"]
    for reason in dict.fromkeys(skipped):
        yield "skipped", f"{skipped.count(reason)}: {reason}"
    for finding in findings:
        if finding.outcome == "failed":
            yield "failed", f"{finding.test}: {finding.reason}"


def _options(given: Sequence[str]) -> dict[str, object]:
    options: dict[str, object] = {}
    for each in given:
        key, equals, value = each.partition("=")
        if not key or not equals:
            msg = f"--option {each!r} is not of the form KEY=VALUE"
            raise UserError(msg)
        options[key] = yaml.safe_load(value)
    return options


@contextmanager
def _progress() -> Iterator[Progress | None]:
    """Show progress if stderr is a terminal."""
    if not sys.stderr.isatty():
        yield None
        return
    with (
        # a copy, because pytest captures the original
        os.fdopen(os.dup(sys.stderr.fileno()), "w", encoding=sys.stderr.encoding) as terminal,
        Console(file=terminal, emoji=False).status("collecting") as status,
    ):
        yield lambda done, total: status.update(f"{done} of {total} tests")
