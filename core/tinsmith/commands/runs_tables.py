"""The tables that `tinsmith runs list` and `runs show` print."""

import json
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any, Final

import msgspec
from pydantic import ByteSize
from rich import box
from rich.console import Console
from rich.table import Table

from tinsmith.processes.logs import escape
from tinsmith.protocol import wire
from tinsmith.store import RunState

_WIDE: Final = 200  # columns, if the output is not a terminal
_LEAST_FOR_TABLE: Final = 120  # columns
_KEPT_WHOLE: Final = {"run", "seq", "kind", "in the log"}
"""Columns that a narrow terminal does not break: what people copy, and what tells the rows apart."""
_STATES: Final = {
    RunState.READY: "green",
    RunState.PARKED: "cyan",
    RunState.LOST: "red",
    RunState.UNLOADED: "dim",
}


def print_runs(page: wire.RunSummaries, *, tenant: str | None, offset: int, where: str) -> None:
    """Print the runs, newest first. `tenant`: if all are one tenant's. `where`: the data directory, or the server."""
    console, total = _console(), page.cursor.total_count
    if not page.runs:
        of = "" if tenant is None else f" of tenant {escape(repr(tenant))}"
        empty = f"no runs{of} in {where}; a run begins when a client creates a training client"
        console.print(empty if total == 0 else f"there are {total} runs; --offset {offset} is past the last")
        return
    if console.width < _LEAST_FOR_TABLE:
        _print_in_lines(console, page.runs)
    else:
        console.print(_runs_table(page.runs), highlight=False)
    last = offset + len(page.runs)
    if last < total:
        console.print(f"{offset + 1} to {last} of {total}; for more, pass --offset {last}", highlight=False)


def _runs_table(runs: Sequence[wire.RunSummary]) -> Table:
    table = _table("run", "name", "base model", "tenant", "state", "rank", "steps", "created", "last request")
    for run in runs:
        table.add_row(
            escape(run.run_id),
            escape(run.name or ""),
            escape(run.base_model),
            escape(run.tenant),
            _state(RunState(run.state)),
            str(run.lora_rank),
            str(run.steps),
            _moment(run.created_at),
            _moment(run.last_request_at),
        )
    return table


def _print_in_lines(console: Console, runs: Sequence[wire.RunSummary]) -> None:
    """Print the id of each run on a line of its own: people copy it."""
    for run in runs:
        console.print(f"[bold]{escape(run.run_id)}[/]", highlight=False, soft_wrap=True)
        about = [
            _state(RunState(run.state)),
            f"{run.steps} steps",
            *map(escape, filter(None, (run.name, run.base_model))),
        ]
        console.print(f"  {', '.join([*about, escape(run.tenant), _moment(run.last_request_at)])}", highlight=False)


def print_run(found: wire.RunReport) -> None:
    """Print one run and a page of its log."""
    console = _console()
    for name, value in _facts(found):
        console.print(f"[bold]{name:<17}[/]{value}", highlight=False, soft_wrap=True)
    console.print()
    if not found.operations:
        console.print(f"its log contains no operations{' from there on' if found.num_logged else ''}")
        return
    console.print(_operations_table(found.operations), highlight=False)
    first, last = found.operations[0].seq_id, found.operations[-1].seq_id
    told = f"seq_id {first} to {last}; the log has {found.num_logged} operations"
    if found.first_seq_id is not None and first > found.first_seq_id:
        told += f"; for earlier ones, pass --from {max(found.first_seq_id, first - len(found.operations))}"
    if found.last_seq_id is not None and last < found.last_seq_id:
        told += f"; for later ones, pass --from {last + 1}"
    console.print(told, highlight=False, soft_wrap=True)
    console.print()
    console.print(_totals_table(found.totals), highlight=False)


def _facts(found: wire.RunReport) -> list[tuple[str, str]]:
    run = found.run
    reason = f": {escape(run.state_reason)}" if run.state_reason else ""
    facts = [
        ("run", escape(run.run_id)),
        ("base model", f"{escape(run.base_model)}, LoRA of rank {run.lora_rank}, seed {found.seed}"),
        ("tenant", f"{escape(run.tenant)}, session {escape(found.session_id)}"),
        ("state", _state(RunState(run.state)) + reason),
        ("created", f"{_moment(run.created_at)}, last request {_moment(run.last_request_at)}"),
        ("applied", f"up to seq_id {found.applied_seq_id}" if found.applied_seq_id >= 0 else "nothing yet"),
    ]
    if run.waits_for is not None:
        facts.append(("now", f"{escape(run.waits_for.text)} ({_seconds(run.waits_for.since_s)})"))
    if run.user_metadata:
        facts.append(("metadata", escape(msgspec.json.encode(run.user_metadata).decode())))
    if found.recovery_points:
        listed = ", ".join(f"{each.seq_id} ({_bytes(each.size_bytes)})" for each in found.recovery_points)
        facts.append(("recovery points", f"after seq_id {listed}"))
    facts += [("checkpoint", f"{escape(each.path)} ({_bytes(each.size_bytes)})") for each in found.checkpoints]
    facts += _lineage(found.lineage, run.run_id)
    if found.oldest_replayable is None:
        facts.append(("replay", "not possible: its log is past its retention"))
    elif found.applied_seq_id >= 0:
        facts.append(("replay", f"possible for --until {found.oldest_replayable} to {found.applied_seq_id}"))
    return facts


def _lineage(runs: Sequence[wire.LineageRun], run_id: str) -> list[tuple[str, str]]:
    """Say from which checkpoints the run took its weights, and which runs took its own."""
    (run,) = (each for each in runs if each.run_id == run_id)
    facts = [("came from", f"{escape(each.path)}, by seq_id {each.seq_id}") for each in run.origins]
    for other in runs:
        taken = dict.fromkeys(each.path for each in other.origins if each.source == run_id)
        if other.run_id != run_id and taken:
            facts.append(("led to", f"{escape(other.run_id)}, by {escape(', '.join(taken))}"))
    return facts


def _operations_table(operations: Sequence[wire.OperationReport]) -> Table:
    table = _table(">seq", "kind", "state", "arrived", ">queued", ">run", ">tokens", ">request", ">result", "outcome")
    for each in operations:
        tries = max(each.attempts, 1) + each.interruptions
        retried = f" [yellow](attempt {tries})[/]" if tries > 1 else ""
        table.add_row(
            str(each.seq_id),
            each.kind,
            _operation_state(each.state) + retried,
            _moment(each.created_at),
            _seconds(each.queued_s),
            _seconds(each.run_s),
            str(each.num_tokens or ""),
            _bytes(each.payload_bytes),
            _bytes(each.result_bytes),
            _outcome(each),
        )
    return table


def _outcome(operation: wire.OperationReport) -> str:
    if operation.error is not None:
        return f"[red]{escape(operation.error)}[/]"
    shown = [
        f"{escape(name)} {'not finite' if value is None else format(value, '.6g')}"
        for name, value in operation.metrics.items()
    ]
    return ", ".join([*shown, *map(escape, operation.notes)])


def _totals_table(totals: Sequence[wire.LogTotals]) -> Table:
    table = _table("in the log", "state", ">number", ">retried", ">tokens", ">requests", ">results", ">queued", ">run")

    def add(kind: str, state: str, of: Sequence[wire.LogTotals]) -> None:
        table.add_row(
            kind,
            state,
            str(sum(each.number for each in of)),
            str(sum(each.retried for each in of) or ""),
            str(sum(each.num_tokens for each in of) or ""),
            _bytes(sum(each.payload_bytes for each in of)),
            _bytes(sum(each.result_bytes for each in of)),
            _seconds(sum(each.queued_s for each in of)),
            _seconds(sum(each.run_s for each in of)),
        )

    for each in totals:
        add(each.kind, _operation_state(each.state), [each])
    if len(totals) > 1:
        table.add_section()
        add("all", "", totals)
    return table


def _table(*headings: str) -> Table:
    """Make a plain table. A heading that begins with > belongs to a right-aligned column of numbers."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, header_style="bold", show_edge=False)
    for heading in headings:
        right = heading.startswith(">")
        kept_whole = heading in _KEPT_WHOLE or right
        table.add_column(
            heading.removeprefix(">"), justify="right" if right else "left", no_wrap=kept_whole, overflow="fold"
        )
    return table


def _state(state: RunState) -> str:
    style = _STATES.get(state)
    return str(state) if style is None else f"[{style}]{state}[/]"


def _operation_state(state: str) -> str:
    return {"succeeded": "[green]succeeded[/]", "failed": "[red]failed[/]"}.get(state, state)


def _moment(moment: datetime) -> str:
    local = moment.astimezone()
    today = datetime.now(UTC).astimezone().date()
    return local.strftime("%H:%M:%S" if local.date() == today else "%Y-%m-%d %H:%M:%S")


def _seconds(seconds: float | None) -> str:
    if seconds is None:
        return ""
    return f"{seconds * 1000:.0f} ms" if seconds < 1 else f"{seconds:.1f} s"


def _bytes(number: int) -> str:
    return ByteSize(number).human_readable(separator=" ")


def _console() -> Console:
    return Console(width=None if sys.stdout.isatty() else _WIDE, emoji=False)  # run ids contain :train:


def print_json(value: Any) -> None:
    # In ASCII, of which a terminal obeys nothing: msgspec escapes fewer characters.
    print(json.dumps(json.loads(msgspec.json.encode(value)), indent=2))  # noqa: T201 - the command's answer
