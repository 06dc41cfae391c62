"""What `tinsmith status` and `top` show. It fits into 60 columns."""

import sys
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Final

from prometheus_client.parser import text_string_to_metric_families
from pydantic import ByteSize
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from tinsmith.errors import UserError
from tinsmith.processes.logs import escape, printable
from tinsmith.protocol import wire
from tinsmith.store import EngineState

_WIDE: Final = 200  # columns, if the output is not a terminal
_MOST_RUNS: Final = 8
_SPAN_S: Final = 15.0  # of rates: engines report every five seconds
_COLOURS: Final = {
    EngineState.READY: "green",
    EngineState.FAILED: "red",
    EngineState.SILENT: "red",
    EngineState.RESTARTING: "yellow",
}


class Rates:
    """Tokens per second, of the counters in the last texts of `/metrics`."""

    def __init__(self) -> None:
        self._read: deque[tuple[float, dict[tuple[str, str], float]]] = deque()

    def add(self, text: str, now_s: float) -> None:
        """Add a text that was read at this moment, in seconds."""
        counted = {
            (sample.labels["base_model"], sample.labels["of"]): sample.value
            for family in text_string_to_metric_families(text)
            if family.name == "tinsmith_tokens"
            for sample in family.samples
            if sample.name == "tinsmith_tokens_total"
        }
        self._read.append((now_s, counted))
        while len(self._read) > 2 and now_s - self._read[1][0] >= _SPAN_S:
            self._read.popleft()

    def of(self, base_model: str, kind: str) -> float | None:
        """Return None until there are two texts. A counter that has begun again counts from zero."""
        (first_s, first), (last_s, last) = self._read[0], self._read[-1]
        if last_s <= first_s:
            return None
        before, now = first.get((base_model, kind), 0.0), last.get((base_model, kind), 0.0)
        return (now - before if now >= before else now) / (last_s - first_s)


def console() -> Console:
    return Console(width=None if sys.stdout.isatty() else _WIDE, emoji=False, highlight=False)


def trouble(found: wire.EngineList) -> bool:
    """Return whether an engine is not ready, its sampler is down, or nothing can be recorded."""
    unwell = [each for each in found.engines if each.state != EngineState.READY or each.sampler is not None]
    return bool(unwell) or found.storage is not None


def print_status(terminal: Console, url: str, found: wire.EngineList) -> None:
    terminal.print(rendered(url, found))


def unreachable(error: UserError) -> RenderableType:
    return Text(printable(str(error)), style="red")


def rendered(
    url: str, found: wire.EngineList, rates: Rates | None = None, runs: Sequence[wire.RunSummary] = ()
) -> RenderableType:
    """Return a block for the server, one for each engine, and one for the runs that have not ended."""
    shown: list[RenderableType] = [Text.from_markup(line, emoji=False) for line in _server(url, found)]
    for each in found.engines:
        shown += [Text(), *(Text.from_markup(line, emoji=False) for line in _engine(each, rates))]
        if each.work:
            shown.append(_work(each.work))
    if live := [run for run in runs if run.waits_for is not None]:
        shown += [Text(), *(Text.from_markup(line, emoji=False) for line in _runs(live))]
    return Group(*shown)


def _runs(runs: Sequence[wire.RunSummary]) -> Iterator[str]:
    yield f"[bold]runs[/] that have not ended, of the newest: {len(runs)}"
    for run in runs[:_MOST_RUNS]:
        waits = run.waits_for
        assert waits is not None
        name = f" {escape(run.name)}" if run.name else ""
        yield f"  [bold]{escape(run.run_id)}[/]{name}, {run.steps} steps"
        yield f"    {escape(waits.text)} ({waits.since_s:.0f} s)"
    if len(runs) > _MOST_RUNS:
        yield f"  and {len(runs) - _MOST_RUNS} more"


def _server(url: str, found: wire.EngineList) -> Iterator[str]:
    yield f"[bold]server[/] {escape(url)} [green]up[/]"
    reserve = ByteSize(found.reserve_bytes).human_readable(separator=" ")
    yield f"[bold]disk[/]   {ByteSize(found.free_bytes).human_readable(separator=' ')} free, {reserve} of them kept"
    if found.storage is not None:
        yield f"[red]requests cannot be recorded: {escape(found.storage)}[/]"


def _engine(engine: wire.EngineView, rates: Rates | None) -> Iterator[str]:
    colour = _COLOURS.get(EngineState(engine.state), "cyan")
    share = "" if engine.progress is None else f" {engine.progress:.0%}"
    yield f"[bold]{escape(engine.base_model)}[/] [{colour}]{escape(engine.state)}{share}[/]"
    if engine.detail:
        yield f"  {escape(engine.detail)}"
    if rates is not None and (trained := rates.of(engine.base_model, "trained")) is not None:
        yield f"  {trained:.0f} tokens/s trained, {rates.of(engine.base_model, 'sampled') or 0.0:.0f} sampled"
    if engine.max_models is not None:
        waiting = f", {engine.models_waiting} waiting" if engine.models_waiting else ""
        yield f"  {engine.models} of {engine.max_models} places for models are taken{waiting}"
    if engine.text is not None:
        yield f"  [yellow]{escape(engine.text)}[/]"
    yield from (f"  [yellow]waits: {reason}[/]" for reason in _waits(engine))
    if engine.last_failure is not None:
        yield f"  last failure, {engine.restarts} restarts: {escape(engine.last_failure)}"


def _waits(engine: wire.EngineView) -> Iterator[str]:
    """Yield why work waits, what concerns most of it first."""
    queued = [each for each in engine.work if each.state == "queued"]
    if not queued:
        return
    if engine.state != EngineState.READY:
        yield f"the engine is {escape(engine.state)}"
    if engine.sampler is not None:
        yield f"nothing is sampled: {escape(engine.sampler)}"
    if engine.models_waiting:
        yield f"for a place (models: {engine.models_waiting}); one becomes free when a session ends"
    if engine.turn_awaited:
        yield f"for the devices, which {engine.turn} has"
    if engine.running_s is not None:
        yield f"for what runs, the oldest for {engine.running_s:.0f} s"


def _work(work: Sequence[wire.PendingView]) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    table.add_column("  tenant", overflow="fold")
    table.add_column("kind", overflow="fold")
    table.add_column("running", justify="right")
    table.add_column("queued", justify="right")
    table.add_column("oldest", justify="right")
    for tenant, kind in dict.fromkeys((each.tenant, each.kind) for each in work):
        own = [each for each in work if (each.tenant, each.kind) == (tenant, kind)]
        number = {each.state: each.number for each in own}
        running, queued = number.get("running", 0), number.get("queued", 0)
        oldest = max(each.oldest_s for each in own)
        table.add_row(f"  {escape(tenant)}", escape(kind), str(running), str(queued), f"{oldest:.0f} s")
    return table
