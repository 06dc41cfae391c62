"""The page about where time goes: tables from what where_time_goes.py measured. No framework."""

from collections.abc import Mapping
from typing import Any, Final

Run = Mapping[str, Any]
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
    parts = [f"Commit {figures['commit']}. {figures['machine']}; {figures['date']}."]
    for model, run in figures["runs"].items():
        parts += [f"### {model.capitalize()}: {figures['models'][model]}", _totals(run)]
    smallest = next(iter(figures["runs"]))
    parts += [f"## Stages, {smallest}", _stages(figures["runs"][smallest])]
    return "\n\n".join(parts)


def _totals(run: Run) -> str:
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


def _stages(run: Run) -> str:
    rows = ["| Operation | Stage | ms |", "|---|---|--:|"]
    for name in _SPLIT:
        found = run["operations"][name]
        rows += [f"| {name} | {each['stage']} | {each['takes_ms']:.2f} |" for each in found["stages"]]
        rows.append(f"| {name} | **the whole** | **{found['total_ms']:.1f}** |")
    return "\n".join(rows)
