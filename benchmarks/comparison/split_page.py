"""The page about where time goes: tables from what where_time_goes.py measured, before and after. No framework."""

from collections.abc import Iterator, Mapping
from typing import Any, Final

Run = Mapping[str, Any]  # Any: JSON, as where_time_goes.py writes it
Figures = Mapping[str, Any]

_SPLIT: Final = (
    "optim_step",
    "forward_backward 8x128",
    "sample 16x64",
    "weight sync",
    "RL iteration, 4 prompts, 4x32 each",
)
"""The operations whose stages are shown one by one."""


def render(figures: Figures) -> str:
    """Return the tables of all sizes, and the stages of the smallest."""
    parts = [_machine(figures)]
    for model, runs in figures["runs"].items():
        parts += [f"### {model.capitalize()}: {figures['models'][model]}", _totals(runs["before"], runs["after"])]
    for model, run in figures.get("alone", {}).items():
        parts += [f"### {model.capitalize()}: {figures['models'][model]}, after", _alone(run)]
    smallest = next(iter(figures["runs"]))
    parts += [f"## Stages, {smallest}", _stages(figures["runs"][smallest])]
    return "\n\n".join(parts)


def _machine(figures: Figures) -> str:
    commits = figures["commits"]
    return f"Before: commit {commits['before']}. After: {commits['after']}. {figures['machine']}; {figures['date']}."


def _totals(before: Run, after: Run) -> str:
    rows = [
        "| Operation | before, ms | after, ms | faster | share of the bound, before | after | alone in XLA, ms |",
        "|---|--:|--:|--:|--:|--:|--:|",
    ]
    for name, found in after["operations"].items():
        earlier = before["operations"].get(name)
        if earlier is None:
            continue
        old, new = earlier["total_ms"], found["total_ms"]
        bounds = (_share(before, name), _share(after, name), _products(after, name))
        rows.append(f"| {name} | {old:,.1f} | {new:,.1f} | {old / new:.1f}x | {' | '.join(bounds)} |")
    return "\n".join(rows)


def _alone(run: Run) -> str:
    rows = ["| Operation | ms | share of the bound | alone in XLA, ms |", "|---|--:|--:|--:|"]
    rows += [
        f"| {name} | {found['total_ms']:,.1f} | {_share(run, name)} | {_products(run, name)} |"
        for name, found in run["operations"].items()
    ]
    return "\n".join(rows)


def _share(run: Run, name: str) -> str:
    share = run["bounds"].get(name)
    return "" if share is None else f"{share:.0%}"


def _products(run: Run, name: str) -> str:
    alone_ms = run["bounds"].get(f"{name}, products alone, ms")
    return "" if alone_ms is None else f"{alone_ms:,.0f}"


def _stages(runs: Mapping[str, Run]) -> str:
    rows = ["| Operation | Stage | before, ms | after, ms |", "|---|---|--:|--:|"]
    for name in _SPLIT:
        by_run = [_by_stage(runs[when], name) for when in ("before", "after")]
        for stage in dict.fromkeys([*by_run[0], *by_run[1]]):
            taken = (f"{found[stage]:.2f}" if stage in found else "" for found in by_run)
            rows.append(f"| {name} | {stage} | {' | '.join(taken)} |")
        totals = (f"**{runs[when]['operations'][name]['total_ms']:.1f}**" for when in ("before", "after"))
        rows.append(f"| {name} | **the whole** | {' | '.join(totals)} |")
    return "\n".join(rows)


def _by_stage(run: Run, name: str) -> dict[str, float]:
    return dict(_pairs(run, name))


def _pairs(run: Run, name: str) -> Iterator[tuple[str, float]]:
    for each in run["operations"][name]["stages"]:
        yield each["stage"], each["takes_ms"]
