"""What `tinsmith serve` prints while engines come up, on a terminal and elsewhere."""

import io
import logging
import sys
from dataclasses import replace
from datetime import UTC, datetime

import pytest
from rich.console import Console

from tinsmith.backend import TrainerCapabilities
from tinsmith.plugins.loading import Plugins
from tinsmith.plugins.registry import PluginReport
from tinsmith.processes.display import EngineDisplay, show_banner
from tinsmith.processes.logs import StderrHandler, console
from tinsmith.settings import ModelSettings, Settings
from tinsmith.store import EngineCapabilities, EngineFailure, EngineRecord, EngineState

CAPABILITIES = EngineCapabilities(
    trainer=TrainerCapabilities(vocab_size=8, max_context_tokens=8, max_batch_tokens=8, device="NVIDIA H200"),
    sampler=None,
)


def record(state: EngineState, detail: str = "", progress: float | None = None) -> EngineRecord:
    known = CAPABILITIES if state is EngineState.READY else None
    return EngineRecord(
        base_model="m", state=state, detail=detail, progress=progress, capabilities=known, updated_at=datetime.now(UTC)
    )


LIFE = [
    record(EngineState.STARTING),
    record(EngineState.LOADING, "loading weights", 0.5),
    record(EngineState.READY),
    record(EngineState.READY, "warming up", 0.25),
    record(EngineState.READY, "warming up", 0.5),
    record(EngineState.READY, "warming up", 1.0),
    record(EngineState.FAILED, "no such [file]"),
]


def shown(*, terminal: bool) -> str:
    console = Console(file=io.StringIO(), force_terminal=terminal, color_system=None, width=100)
    display = EngineDisplay(console, ("m",))
    for each in LIFE:
        display.update([each])
    display.close()
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_the_banner_says_which_plugins_are_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    broken = PluginReport(name="bad", distribution="tin-bad", version="1.2", error="long story")
    plugins = Plugins()
    monkeypatch.setattr(plugins, "report", lambda: [broken])
    console = Console(file=io.StringIO(), color_system=None, width=200)
    show_banner(console, Settings(models=(ModelSettings(name="m"),)), plugins, "http://here")
    assert isinstance(console.file, io.StringIO)
    lines = [line.split() for line in console.file.getvalue().splitlines()]
    assert ["broken", "plugins", "bad;", "see", "`tinsmith", "plugins`"] in lines


def test_elsewhere_every_stage_is_a_line() -> None:
    assert shown(terminal=False).splitlines() == [
        "starting m",
        "loading m: loading weights 50%",
        "ready m on NVIDIA H200",
        "ready m on NVIDIA H200: warming up 25%",
        "ready m on NVIDIA H200",
        "failed m: no such [file]",
    ]


def test_a_terminal_shows_progress_in_place_and_keeps_what_was_reached() -> None:
    text = shown(terminal=True)
    assert "loading m: loading weights 50%" in text
    assert "ready m on NVIDIA H200: warming up 50%" in text
    assert text.count("ready m on NVIDIA H200\n") + text.count("ready m on NVIDIA H200\r\n") == 1
    assert text.rstrip().endswith("failed m: no such [file]")


# One console ----------------------------------------------------------------------------------------------------------


def test_what_is_logged_while_something_loads_stands_above_the_progress(capfd: pytest.CaptureFixture[str]) -> None:
    terminal = Console(file=io.StringIO(), force_terminal=True, color_system=None, width=60)
    log = logging.getLogger("of this test")
    log.propagate = False
    log.handlers = [StderrHandler()]
    display = EngineDisplay(terminal, ("m",))
    display.update([record(EngineState.LOADING, "loading weights", 0.5)])
    log.error("from the log")
    print("[m] from an engine", file=sys.stderr)
    display.close()
    log.error("afterwards")
    assert isinstance(terminal.file, io.StringIO)
    shown_above = terminal.file.getvalue()
    assert "from the log\n" in shown_above
    assert "[m] from an engine\n" in shown_above
    assert capfd.readouterr().err == "afterwards\n"


@pytest.mark.parametrize("is_terminal", [True, False])
def test_lines_are_wrapped_on_terminals_alone(is_terminal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    output = io.StringIO()
    monkeypatch.setattr(output, "isatty", lambda: is_terminal, raising=False)
    monkeypatch.setattr(sys, "stderr", output)
    name = "models/" * 20
    show_banner(console(stderr=True), Settings(models=(ModelSettings(name=name),)), Plugins(), "http://here")
    EngineDisplay(console(stderr=True), (name,)).update(
        [EngineRecord(base_model=name, state=EngineState.SILENT, detail="why " * 30, updated_at=datetime.now(UTC))]
    )
    lines = output.getvalue().splitlines()
    assert any(line.endswith(name) or f"{name}:" in line for line in lines) is not is_terminal
    assert any(line.count("why") == 30 for line in lines) is not is_terminal


def test_a_failure_that_the_log_has_told_is_not_told_again() -> None:
    text = "the engine of 'm' ended with exit code 2 (reference 12345678 in the operator's log)"
    failure = EngineFailure(attempt=1, text=text, reference="12345678", cause="no such device")
    output = io.StringIO()
    display = EngineDisplay(Console(file=output, width=200), ("m",))
    for state, follows in ((EngineState.RESTARTING, "restarting in 2 s"), (EngineState.FAILED, "fix it")):
        display.update([replace(record(state, f"{text}; {follows}"), failure=failure)])
    assert output.getvalue().splitlines() == ["restarting m: restarting in 2 s", "failed m: fix it"]
