"""Runs the contract suites for everything that a plugin offers, and reports the outcome of each test.

pytest explains a failed assert only in modules that it imports itself. So this module does not import
`tinsmith.testing`: it writes a two-line test file through which pytest finds the suites.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Final, Literal

from pydantic import ValidationError

from tinsmith.errors import PluginError, UserError
from tinsmith.plugins.registry import Offer
from tinsmith.scratch import Scratch
from tinsmith.settings.secrets import cleaned, hidden

if TYPE_CHECKING:
    import pytest

    from tinsmith.backend import Capabilities

Outcome = Literal["passed", "skipped", "failed"]
Progress = Callable[[int, int], None]
"""Called with the number of tests that have run, and the number of all tests."""

_TEST_FILE: Final = """\
from tinsmith.testing.plugin_suites import suites_of

globals().update(suites_of({plugin!r}, options={options!r}, trainer={trainer!r}))
"""
_INI: Final = """\
[pytest]
asyncio_mode = auto
asyncio_default_fixture_loop_scope = function
"""
_SHIPPED: Final = "tinsmith.testing."
_OF_AUTHORS: Final = "test_overridden_tests_are"  # it holds an author's own test file, not the plugin
_ISOLATION_DIFFERENCE: Final = "isolation_difference"  # as tinsmith.testing.training_isolation records it
_ABUSE: Final = "abuse"  # as tinsmith.testing.abuse_tally records it
_CAPABILITIES: Final = "capabilities"  # as tinsmith.testing.plugin_suites records them


@dataclass(frozen=True, slots=True, kw_only=True)
class Offered:
    """Which offer."""

    kind: str
    name: str

    def __str__(self) -> str:
        return f"{self.kind} {self.name}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """What came of one test."""

    offer: Offered
    area: str  # "optimizer": what part of the contract the test belongs to
    test: str
    outcome: Outcome
    reason: str = ""  # why it was skipped, or how it failed, in one line
    traceback: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckReport:
    """What came of everything. Mappings have an entry for each backend and sampler that could be made."""

    findings: Sequence[Finding]
    capabilities: Mapping[Offered, Mapping[str, Capabilities]]  # by role: trainer, sampler
    isolation_difference: Mapping[Offered, float]  # measured: the greatest one of a logprob, in nats
    abuse: Mapping[Offered, Sequence[Mapping[str, object]]]  # for each group of cases, counts of their outcomes

    def num(self, outcome: Outcome) -> int:
        return sum(finding.outcome == outcome for finding in self.findings)


def check_plugin(
    plugin: str,
    offers: Sequence[Offer],
    *,
    options: Mapping[str, object],
    trainer: str | None = None,
    progress: Progress | None = None,
) -> CheckReport:
    """Run every suite that holds one of the offers.

    `options` are the settings of a configuration file's section. A sampler gets the adapters of the backend `trainer`.
    Raise UserError for options that no offer accepts, PluginError if the suites cannot run.
    """
    hidden(dict(options))  # remembers the secrets among them
    _check_options(offers, options)
    if not offers:
        return CheckReport(findings=(), capabilities={}, isolation_difference={}, abuse={})
    try:
        import hypothesis
        import pytest
        import pytest_asyncio
    except ModuleNotFoundError as error:
        msg = f"the contract suites need {error.name}; install it with pip install 'tinsmith[testing]'"
        raise PluginError(msg) from error
    del hypothesis, pytest_asyncio
    collector = _Collector(progress)
    with Scratch("tinsmith-check-") as scratch, contextlib.chdir(scratch.path):
        test_file, ini = scratch.path / "test_plugin.py", scratch.path / "pytest.ini"
        test_file.write_text(_TEST_FILE.format(plugin=plugin, options=dict(options), trainer=trainer), encoding="utf-8")
        ini.write_text(_INI, encoding="utf-8")
        quiet = ["-p", "no:terminal", "-p", "no:cacheprovider"]
        here = ["-c", str(ini), "--rootdir", str(scratch.path), str(test_file)]
        code = pytest.main([*quiet, *here], plugins=[collector])
    if collector.errors or code not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
        told = "\n".join(collector.errors) or f"pytest ended with {code!r}"
        msg = f"the suites of plugin {plugin!r} cannot be run: {told}"
        raise PluginError(msg)
    return collector.report()


def _check_options(offers: Sequence[Offer], options: Mapping[str, object]) -> None:
    configs = [offer.spec.config for offer in offers if offer.kind != "loss"]
    known = sorted({name for config in configs for name in config.model_fields})
    unknown = sorted(options.keys() - set(known))
    if unknown:
        msg = f"no option {unknown[0]!r}; this plugin has: {', '.join(known) or 'none'}"
        raise UserError(msg)
    for config in configs:
        try:
            config.model_validate({key: value for key, value in options.items() if key in config.model_fields})
        except ValidationError as error:
            first = error.errors()[0]
            key = ".".join(str(part) for part in first["loc"])
            msg = f"option {key!r}: {first['msg']}; give it with --option {key}=VALUE"
            raise UserError(msg) from error


class _Collector:
    """A pytest plugin that keeps the outcome of each test."""

    def __init__(self, progress: Progress | None) -> None:
        self.errors: list[str] = []
        self._progress = progress
        self._tests: dict[str, tuple[Offered, str, str]] = {}  # by node: whose, its area, its name
        self._findings: dict[str, Finding] = {}
        self._num_done = 0
        self._capabilities: dict[Offered, Mapping[str, Capabilities]] = {}
        self._differences: dict[Offered, float] = {}
        self._abuse: dict[Offered, list[Mapping[str, object]]] = {}

    def report(self) -> CheckReport:
        return CheckReport(
            findings=tuple(self._findings.values()),
            capabilities=self._capabilities,
            isolation_difference=self._differences,
            abuse=self._abuse,
        )

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        items[:] = [item for item in items if not item.name.startswith(_OF_AUTHORS)]
        for item in items:
            suite: Any = getattr(item, "cls", None)
            kind, name = suite.offer
            function = getattr(item, "originalname", item.name)
            area = getattr(suite, "area", None) or _area(suite, function)
            self._tests[item.nodeid] = (Offered(kind=kind, name=name), area, item.name)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.errors.append(cleaned(str(report.longrepr)))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        offer, area, test = self._tests[report.nodeid]
        if report.when == "call" or report.outcome != "passed":
            self._findings[report.nodeid] = Finding(
                offer=offer,
                area=area,
                test=test,
                outcome=report.outcome,
                reason=cleaned(_reason(report)),  # a plugin may quote its options
                traceback=cleaned(str(report.longrepr)) if report.failed else "",
            )
        if report.when == "teardown":
            self._keep_properties(offer, dict(report.user_properties))
            self._num_done += 1
            if self._progress is not None:
                self._progress(self._num_done, len(self._tests))

    def _keep_properties(self, offer: Offered, properties: Mapping[str, Any]) -> None:
        if _CAPABILITIES in properties:
            self._capabilities[offer] = properties[_CAPABILITIES]
        if _ISOLATION_DIFFERENCE in properties:
            measured = float(properties[_ISOLATION_DIFFERENCE])
            self._differences[offer] = max(measured, self._differences.get(offer, 0.0))
        if _ABUSE in properties:
            self._abuse.setdefault(offer, []).append(properties[_ABUSE])


def _area(suite: type, test: str) -> str:
    """Return "request store" for a test that RequestStoreContract defines."""
    owner = next(cls for cls in suite.__mro__ if cls.__module__.startswith(_SHIPPED) and test in vars(cls))
    words = "".join(f" {letter.lower()}" if letter.isupper() else letter for letter in owner.__name__)
    return words.removesuffix(" contract").strip()


def _reason(report: pytest.TestReport) -> str:
    match report.longrepr:
        case None:
            return ""
        case (_, _, str(reason)):
            return reason.removeprefix("Skipped: ")
        case longrepr:
            crash = getattr(longrepr, "reprcrash", None)
            lines = [line.strip() for line in str(crash.message if crash is not None else longrepr).splitlines()]
            told = [line for line in lines if line and line != "AssertionError:"]  # of NumPy's, the next line says it
            return told[0] if told else ""


def as_json(report: CheckReport) -> str:
    """Return everything as one JSON object."""
    offers = dict.fromkeys(finding.offer for finding in report.findings)
    return json.dumps([_offer_as_json(report, offer) for offer in offers], indent=2)


def _offer_as_json(report: CheckReport, offer: Offered) -> dict[str, object]:
    roles = report.capabilities.get(offer, {})
    return {
        "kind": offer.kind,
        "name": offer.name,
        "capabilities": {role: claims(capabilities) for role, capabilities in roles.items()},
        "isolation_difference": report.isolation_difference.get(offer),
        "abuse": report.abuse.get(offer, []),
        "tests": [
            {"area": each.area, "test": each.test, "outcome": each.outcome, "reason": each.reason}
            for each in report.findings
            if each.offer == offer
        ],
    }


def claims(capabilities: Capabilities) -> dict[str, object]:
    """Return what a backend says of itself, sets as sorted lists."""
    values = asdict(capabilities)
    return {name: sorted(value) if isinstance(value, frozenset) else value for name, value in values.items()}
