"""What `tinsmith serve` prints while engines come up, on a terminal and elsewhere."""

import io
from datetime import UTC, datetime

from rich.console import Console

from tinsmith.backend import Capabilities
from tinsmith.startup_display import EngineDisplay
from tinsmith.store import EngineRecord, EngineState

CAPABILITIES = Capabilities(vocab_size=8, max_context_tokens=8, max_batch_tokens=8, device="NVIDIA H200")


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
