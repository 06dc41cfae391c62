"""A curve that grows in the terminal while a script runs; plain lines where the output is not a terminal."""

from types import TracebackType
from typing import Self

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

_EIGHTHS = [" ", *(chr(code) for code in range(0x2581, 0x2589))]  # block elements, one to eight eighths high


class LiveCurve:
    """Use with `with`, and call `add` once a step."""

    def __init__(self, title: str, *, num_steps: int, height: int = 10, every: int = 5) -> None:
        self._title = title
        self._num_steps = num_steps
        self._height = height
        self._every = every  # on something that is no terminal
        self._values: list[float] = []
        self._console = Console(emoji=False)
        self._live = Live(console=self._console, auto_refresh=False) if self._console.is_terminal else None

    def __enter__(self) -> Self:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()

    def add(self, value: float) -> None:
        self._values.append(value)
        step = len(self._values)
        if self._live is not None:
            self._live.update(self._draw(), refresh=True)
        elif step == 1 or step % self._every == 0 or step == self._num_steps:
            print(f"step {step:3d}/{self._num_steps}  {self._title} {value:.4f}", flush=True)

    def _draw(self) -> Group:
        top = max(self._values) or 1.0
        width = max(20, self._console.width - 12)
        columns = _squeezed(self._values, min(width, self._num_steps))
        lines = [Text(f"{self._title}  step {len(self._values)}/{self._num_steps}  now {self._values[-1]:.4f}", "bold")]
        for row in range(self._height, 0, -1):
            label = f"{top * row / self._height:8.3f} |"
            cells = "".join(_cell(value / top * self._height - (row - 1)) for value in columns)
            lines.append(Text(label) + Text(cells, "green"))
        return Group(*lines)


def _cell(filled: float) -> str:
    """Return the block that is filled by this share of its height."""
    return _EIGHTHS[round(8 * min(1.0, max(0.0, filled)))]


def _squeezed(values: list[float], width: int) -> list[float]:
    """Return at most `width` values, the last of each stretch."""
    if len(values) <= width:
        return values
    return [values[(index + 1) * len(values) // width - 1] for index in range(width)]
