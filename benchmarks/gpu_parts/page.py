"""The page of what was measured on GPUs: tables of the runs that history.py keeps. No framework."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

Run = Mapping[str, Any]
Figures = Mapping[str, Any]

_SHARES: Final = ("share_of_matmul_limit", "share_of_bandwidth_limit")
_OURS, _PEER = "jax_training", "skyrl_training"
_TRAINERS: Final = ("training", _OURS, _PEER, "experts", "peft_training")
_NOT_BESIDE: Final = "SkyRL's JAX backend was not measured beside ours on a GPU yet."
_ABOUT_A_PART: Final = ("part_took_s", "error", "not_measured")


def render(runs: Sequence[Run]) -> str:
    """Return the runs as Markdown, after a sentence if SkyRL's JAX backend was in none of them."""
    lacking = [] if any(list(_beside(run["parts"])) for run in runs) else [_NOT_BESIDE]
    return "\n\n".join([*lacking, *(part for run in _newest(runs) for part in _run(run))])


def _newest(runs: Sequence[Run]) -> Iterator[Run]:
    """Yield the runs, the newest first, each without the parts that a newer one measured on the same card."""
    shown: set[tuple[str, str]] = set()
    for run in runs:
        parts = {name: part for name, part in run["parts"].items() if (run["card"], name) not in shown}
        shown |= {(run["card"], name) for name in parts}
        if parts:
            yield {**run, "parts": parts}


def _run(run: Run) -> Iterator[str]:
    parts: Mapping[str, Figures] = run["parts"]
    yield f"### {run['when']}, {run['card']}"
    yield "\n".join(_facts(run))
    yield from _table(["Training", "s", "tokens/s", "of the matmul limit", "peak, GiB", "plan, GiB"], _training(parts))
    yield from _table(["Beside SkyRL's JAX backend, tokens/s", "ours", "SkyRL", "ours / SkyRL"], _beside(parts))
    yield from _table(["Kernels of a step, ms", *_kinds(parts)], _kernels(parts))
    yield from _table(["Other figures", "found"], _others(parts), align="---")


def _facts(run: Run) -> Iterator[str]:
    versions = ", ".join(f"{name} {version}" for name, version in run["versions"].items())
    yield f"- **On:** {run['card']}, {run['memory']}, driver {run['driver']}; {versions}."
    yield f"- **tinsmith** at {run['commit']}."
    limits = run["parts"].get("limits", {})
    if "matmul_tflops" in limits:
        yield (
            f"- **The card's limits, measured:** {limits['matmul_tflops']:.0f} TFLOP/s in a product of matrices, "
            f"{limits['bandwidth_gb_per_s']:,.0f} GB/s in a copy."
        )
    for name, figures in run["parts"].items():
        for word in ("error", "not_measured"):
            if word in figures:
                yield f"- **{name}**: {'failed' if word == 'error' else 'not measured'}: {figures[word]}."


def _table(head: Sequence[str], rows: Iterator[Sequence[str]], align: str = "--:") -> Iterator[str]:
    """Yield a table, if it has rows."""
    lines = [f"| {' | '.join(row)} |" for row in rows]
    if lines:
        yield "\n".join([f"| {' | '.join(head)} |", "|---|" + f"{align}|" * (len(head) - 1), *lines])


def _training(parts: Mapping[str, Figures]) -> Iterator[Sequence[str]]:
    for part, name, figures in _groups(parts):
        if _is_training(part, figures):
            s = figures.get("forward_backward_s", figures.get("s"))
            speed = figures.get("tokens_per_s", figures["tokens"] / s)
            sizes = (_number(figures[key]) if figures.get(key) else "" for key in ("peak_gib", "plan_gib"))
            yield _named(part, name), _number(s), f"{speed:,.0f}", f"{figures['share_of_matmul_limit']:.1%}", *sizes


def _beside(parts: Mapping[str, Figures]) -> Iterator[Sequence[str]]:
    """Yield the speeds of whole steps with the same tokens: with SkyRL's fastest settings, beside the jax backend's."""
    best: dict[int, Figures] = {}
    for part, _, figures in _groups(parts):
        if part == _PEER and "tokens_per_s" in figures:
            tenants = figures["tenants"]
            best[tenants] = max(best.get(tenants, figures), figures, key=lambda each: each["tokens_per_s"])
    ours = parts.get(_OURS, {})
    for tenants, theirs in best.items():
        passes, steps = (ours.get(f"{name}, tenants: {tenants}", {}) for name in ("forward_backward", "optim_step"))
        if passes.get("tokens") == theirs["tokens"] and "tokens_per_s" in steps:
            speeds = steps["tokens_per_s"], theirs["tokens_per_s"]
            yield f"tenants: {tenants}", *(f"{speed:,.0f}" for speed in speeds), f"{speeds[0] / speeds[1]:.2f}"


def _is_training(part: str, figures: Figures) -> bool:
    return part in _TRAINERS and "share_of_matmul_limit" in figures and "tokens" in figures


def _kinds(parts: Mapping[str, Figures]) -> list[str]:
    return list(dict.fromkeys(kind for _, _, figures in _groups(parts) for kind in figures.get("by_kind_s", ())))


def _kernels(parts: Mapping[str, Figures]) -> Iterator[Sequence[str]]:
    kinds = _kinds(parts)
    for part, name, figures in _groups(parts):
        if "by_kind_s" in figures:
            spent = figures["by_kind_s"]
            yield _named(part, name), *(f"{1000 * spent[kind]:,.0f}" if kind in spent else "" for kind in kinds)


def _others(parts: Mapping[str, Figures]) -> Iterator[Sequence[str]]:
    for part, name, figures in _groups(parts):
        if part == "limits" or _is_training(part, figures) or "by_kind_s" in figures:
            continue
        yield _named(part, name), "; ".join(_figure(key, value) for key, value in figures.items())


def _groups(parts: Mapping[str, Figures]) -> Iterator[tuple[str, str, Figures]]:
    """Yield every group of figures with its part and name; those of the part itself have no name."""
    for part, figures in parts.items():
        own = {key: value for key, value in figures.items() if not isinstance(value, dict) and key not in _ABOUT_A_PART}
        if own:
            yield part, "", own
        for name, value in figures.items():
            if isinstance(value, dict):
                yield part, name, value


def _named(part: str, name: str) -> str:
    return f"`{part}`{', ' if name else ''}{name}"


def _figure(key: str, value: object) -> str:
    if isinstance(value, str):
        return f"{key}: {value}".replace("|", "\\|")
    name = key.replace("_", " ")
    if isinstance(value, float):
        return f"{name} {value:.1%}" if key in _SHARES else f"{name} {_number(value)}"
    return f"{name} {value}" if not isinstance(value, int) or isinstance(value, bool) else f"{name} {value:,}"


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
