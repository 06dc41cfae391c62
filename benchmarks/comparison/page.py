"""Shows the figures of a comparison as Markdown: tables with ratios and their spread, and where the first server loses.

No imports but those of the standard library, because docs/generate.py loads this file by its path.
"""

from collections.abc import Iterable, Mapping, Sequence
from statistics import median as _median
from statistics import quantiles
from typing import Any, Final

Figures = Mapping[str, Any]

_FEW: Final = 4
_EVEN: Final = 1.0


def median(values: Sequence[float]) -> float:
    return float(_median(values))


def render(found: Figures) -> str:
    """Return the page's generated part."""
    parts = [_circumstances(found)]
    parts += [_model(model) for model in found["models"]]
    parts.append(_losses(found["models"]))
    parts.append(_thrown_away(found))
    return "\n\n".join(parts)


def ratios(figure: Figures, ours: str, peer: str) -> list[float]:
    """Return how many times as fast we are, round by round. Nothing if one of the two has no figure."""
    pairs = zip(figure["values"].get(ours, []), figure["values"].get(peer, []), strict=False)
    if figure["unit"] == "count":
        return []
    more_is_better = figure["unit"].endswith("/s")
    return [(mine / theirs if more_is_better else theirs / mine) for mine, theirs in pairs]


def _circumstances(found: Figures) -> str:
    machine = found["machine"]
    lines = [
        f"- **When:** {found['when']}, tinsmith at {found['commit']}.",
        f"- **Machine:** {machine['cores']} cores of {machine['cpu']}, {machine['memory_gib']} GiB, "
        f"{machine['system']}, Python {machine['python']}.",
    ]
    for server in found["models"][0]["servers"]:
        settings = ", ".join(f"{name} {value}" for name, value in server["configuration"].items())
        lines.append(f"- **{server['name']}** {server['version']}, SDK {server['sdk']}: {settings}.")
    return "\n".join(lines)


def _model(model: Figures) -> str:
    names = [server["name"] for server in model["servers"]]
    ours, *peers = names
    header = [
        "Figure",
        "Unit",
        *names,
        *(f"times as fast as {peer}" for peer in peers),
        *(f"CPU s, {n}" for n in names),
    ]
    rows = [_row(figure, ours, peers) for figure in model["figures"]]
    lines = [f"### {model['model']}: {_millions(model['parameters'])} parameters", "", *_table(header, rows), ""]
    lines += [_server(server) for server in model["servers"]]
    return "\n".join(lines)


def _row(figure: Figures, ours: str, peers: Sequence[str]) -> list[str]:
    names = [ours, *peers]
    values = [_values(figure, name) for name in names]
    compared = [_spread(ratios(figure, ours, peer), "x") for peer in peers]
    cpu = [_number(median(figure["server_cpu_s"][name])) if figure["server_cpu_s"].get(name) else "" for name in names]
    return [figure["figure"], figure["unit"], *values, *compared, *cpu]


def _values(figure: Figures, name: str) -> str:
    if name in figure["errors"]:
        return "failed"
    return _spread(figure["values"].get(name, []))


def _spread(values: Sequence[float], prefix: str = "") -> str:
    """Return the median, and in brackets the quartiles, or both ends of a few values."""
    if not values:
        return ""
    middle = prefix + _number(median(values))
    if len(values) == 1:
        return middle
    low, high = (min(values), max(values)) if len(values) < _FEW else quantiles(values, n=4)[::2]
    return f"{middle} ({_number(low)} to {_number(high)})"


def _server(server: Figures) -> str:
    cache = "programs of an earlier run at hand" if server["cache_was_warm"] else "nothing compiled before"
    return (
        f"- {server['name']}: peak memory {server['peak_mib']:,.0f} MiB; the start took {server['start_cpu_s']:.0f} "
        f"CPU seconds with {cache}, and was over {server['settled_s']:.0f} s after the first step."
    )


def _losses(models: Iterable[Figures]) -> str:
    lost, failed = [], []
    for model in models:
        ours, *peers = [server["name"] for server in model["servers"]]
        for figure in model["figures"]:
            where = f"{figure['figure']} ({model['model']})"
            for peer in peers:
                found = ratios(figure, ours, peer)
                if found and median(found) < _EVEN:
                    lost.append(f"- {where}: {_spread(found, 'x')} of {peer}")
            failed += [f"- {where}, {name}: {error}" for name, error in figure["errors"].items()]
    compared = any(len(model["servers"]) > 1 for model in models)
    text = "### Where tinsmith loses\n\n"
    text += "\n".join(lost) or ("In no figure of this run." if compared else "Nothing was compared.")
    return text + ("\n\n### What failed\n\n" + "\n".join(failed) if failed else "")


def _thrown_away(found: Figures) -> str:
    limit = found["method"]["most_cores_of_others"]
    if found["method"]["load_was_allowed"]:
        return "**This run kept disturbed rounds** (`--allow-load`): its figures prove nothing."
    lines = [
        f"- {figure['figure']} ({model['model']}): {figure['thrown_away']}, others used up to "
        f"{_number(figure['most_others'])} cores; {len(next(iter(figure['values'].values()), []))} kept"
        for model in found["models"]
        for figure in model["figures"]
        if figure["thrown_away"]
    ]
    said = "\n".join(lines) or "None."
    return f"### Rounds thrown away, because others used more than {limit} cores\n\n{said}"


def _table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    return [_line(header), "|---" * len(header) + "|", *map(_line, rows)]


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _millions(number: int) -> str:
    return f"{number / 1e6:.1f} million"


def _number(value: float) -> str:
    """Return three significant digits."""
    if value >= 100:
        return f"{value:,.0f}"
    return f"{value:.3g}"
