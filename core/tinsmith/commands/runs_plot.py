"""The curves of a run, drawn with braille dots."""

import shutil
import sys
from collections.abc import Sequence
from itertools import pairwise
from typing import Final

from rich.console import Console

from tinsmith.commands.open_store import find_run
from tinsmith.errors import UserError
from tinsmith.processes.logs import escape
from tinsmith.protocol import wire
from tinsmith.server.run_views import joined, read_measured, series_of
from tinsmith.store import RequestStore

_FIRST: Final = ("reward", "loss", "kl", "norm", "tokens_per_s")  # as on the page
_DEFAULT: Final = 4  # charts, unless metrics are named
_LINES: Final = 8  # of a chart
_WIDTH: Final = 100  # columns, if the output is no terminal
_LABEL: Final = 10  # columns of the numbers beside a chart
_BRAILLE: Final = 0x2800
_DOTS: Final = ((0x01, 0x02, 0x04, 0x40), (0x08, 0x10, 0x20, 0x80))  # by column and row of a character


async def read_curves(store: RequestStore, run: str) -> wire.RunCurves:
    """Raise TinsmithError as `find_run` does."""
    model_id = await find_run(store, run)
    record = await store.get_run(model_id)
    series = series_of(joined(await read_measured(store, model_id)), max_points=1000)
    return wire.RunCurves(run_id=model_id, steps=record.steps, series=series)


def print_plot(curves: wire.RunCurves, metrics: Sequence[str]) -> None:
    """Print the metrics whose names hold one of these words. Raise UserError if none does, or nothing is measured."""
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else _WIDTH
    console = Console(width=width, emoji=False, highlight=False)
    console.print(f"[bold]{escape(curves.run_id)}[/], {curves.steps} steps", soft_wrap=True)
    for each in _chosen(curves, metrics):
        console.print(f"\n[bold]{escape(each.name)}[/] {_number(_finite(each)[-1][1])}", soft_wrap=True)
        for line in chart(_finite(each), width=width - _LABEL - 1, lines=_LINES):
            console.print(line if console.encoding == "utf-8" else _in_ascii(line), soft_wrap=True, markup=False)


def _chosen(curves: wire.RunCurves, metrics: Sequence[str]) -> list[wire.Series]:
    drawable = [each for each in curves.series if _finite(each)]
    if not drawable:
        msg = f"run {curves.run_id!r} has measured nothing yet"
        raise UserError(msg)
    if not metrics:
        return sorted(drawable, key=_rank)[:_DEFAULT]
    chosen = [each for each in drawable if any(word in each.name for word in metrics)]
    if not chosen:
        msg = (
            f"no metric is named like {', '.join(map(repr, metrics))}; there are {', '.join(s.name for s in drawable)}"
        )
        raise UserError(msg)
    return sorted(chosen, key=_rank)


def _rank(series: wire.Series) -> tuple[int, str]:
    found = (at for at, word in enumerate(_FIRST) if word in series.name)
    return next(found, len(_FIRST)), series.name


def _finite(series: wire.Series) -> list[tuple[int, float]]:
    pairs = zip(series.steps, series.values, strict=True)
    return [(step, value) for step, value in pairs if value is not None]


def chart(points: Sequence[tuple[int, float]], *, width: int, lines: int) -> list[str]:
    """Return lines of braille dots with the largest and the least value beside them, and the steps below."""
    width = max(width, 10)
    first, last = points[0][0], points[-1][0]
    least, largest = min(value for _, value in points), max(value for _, value in points)
    x_unit = (2 * width - 1) / max(last - first, 1)
    y_unit = (4 * lines - 1) / (largest - least) if largest > least else 0.0
    dots = [(round((step - first) * x_unit), round((largest - value) * y_unit)) for step, value in points]
    cells = [[0] * width for _ in range(lines)]
    for x, y in (dots[0], *(dot for start, end in pairwise(dots) for dot in _line(start, end))):
        cells[y // 4][x // 2] |= _DOTS[x % 2][y % 4]
    labels = [""] * lines
    labels[0], labels[-1] = _number(largest), _number(least)
    drawn = ["".join(chr(_BRAILLE + cell) for cell in row) for row in cells]
    steps = f"{first}{last:>{width - len(str(first))}}" if last > first else str(first)
    return [f"{label:>{_LABEL}} {row}" for label, row in zip(labels, drawn, strict=True)] + [f"{'':>{_LABEL}} {steps}"]


def _in_ascii(line: str) -> str:
    """Draw a star for each character with dots."""
    return "".join(" *"[ord(each) > _BRAILLE] if ord(each) >= _BRAILLE else each for each in line)


def _line(start: tuple[int, int], end: tuple[int, int]) -> list[tuple[int, int]]:
    """Return the dots from one to another, without the first."""
    (x, y), (to_x, to_y) = start, end
    number = max(abs(to_x - x), abs(to_y - y), 1)
    return [(x + round((to_x - x) * at / number), y + round((to_y - y) * at / number)) for at in range(1, number + 1)]


def _number(value: float) -> str:
    return f"{value:.4g}"
