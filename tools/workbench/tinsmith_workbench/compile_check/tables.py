"""Figures as tables in Markdown."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from typing import Final

from tinsmith_workbench.compile_check.figures import Figures
from tinsmith_workbench.compile_check.report import mesh_text, share

_GIB: Final = 1 << 30
_SLICES: Final = (1, 4, 16, 64, 256)


def read_lines(text: str) -> list[Figures]:
    """Read what compile-check --json has written, and put it into order."""
    rows = [Figures.model_validate_json(line) for line in text.splitlines() if line]
    return sorted(rows, key=lambda row: (row.options.model, row.slice.chip.name, row.slice.num_chips, _order(row)))


def _order(row: Figures) -> tuple[object, ...]:
    mesh, options = row.options.mesh, row.options
    asked = options.tokens, options.slots, options.kernels, options.recompute
    return options.tenants, mesh.tensor, mesh.fsdp, *asked, row.facts.gathers_once, row.program


def passes(rows: Iterable[Figures]) -> str:
    """Return passes with gradients, one a row."""
    head = _header(
        "Model", "Slice", "Mesh", "Tenants", "Tokens a stream", "GiB a chip", "Fits", "FLOPs / formula",
        "ms of compute, HBM, links", "Tokens/s, overlapped", "in turn", "a chip", "Share of peak", "Compiler",
    )  # fmt: skip
    return "\n".join((*head, *(_pass(row) for row in rows if row.program == "gradients")))


def _pass(figures: Figures) -> str:
    options, made = figures.options, figures.compiled
    special = ("" if options.kernels == "device" else ", reference kernels") + ("" if options.recompute else ", kept")
    tenants = f"{options.tenants}{special}"
    first = [options.model, options.topology, mesh_text(figures), tenants, f"{options.tokens:,}"]
    if made is None:
        return _cells(*first, "more than there is", "**no**", *[""] * 6, figures.compiler)
    time = figures.seconds()
    rate = figures.tokens / time.overlapped
    speed = (
        f"{rate:,.0f}", f"{figures.tokens / time.in_turn:,.0f}", f"{rate / figures.slice.num_chips:,.0f}",
        share(figures, time.overlapped),
    )  # fmt: skip
    return _cells(
        *first,
        _of_chip(figures),
        "yes" if figures.fits else "**no**",
        f"{made.flops / figures.formula_flops:.3f}",
        _times(figures),
        *(speed if figures.fits and not figures.doubt else [""] * 4),
        figures.compiler,
    )


def slices(rows: Iterable[Figures]) -> str:
    """Return passes with gradients, a row for each model and kind of chip, a column for each number of chips.

    A cell has the memory of a chip, and tokens a second and chip: overlapped, and in turn.
    """
    found: dict[tuple[str, str], dict[int, Figures]] = defaultdict(dict)
    for row in rows:
        if row.program == "gradients":
            found[row.options.model, row.slice.chip.name][row.slice.num_chips] = row
    head = _header("Model", "Chip", *(f"{number} chips" if number > 1 else "1 chip" for number in _SLICES), "Compiler")
    body = (
        _cells(model, chip, *(_slice_cell(sizes.get(number)) for number in _SLICES), _compilers(sizes.values()))
        for (model, chip), sizes in found.items()
    )
    return "\n".join((*head, *body))


def _compilers(rows: Iterable[Figures]) -> str:
    return "; ".join(sorted({row.compiler for row in rows}))


def _slice_cell(figures: Figures | None) -> str:
    if figures is None:
        return ""
    if figures.compiled is None:
        return "**no**"
    if not figures.fits:
        return f"**no**: {(figures.needed_bytes or 0) / _GIB:.1f} GiB"
    if figures.doubt:
        return f"{(figures.needed_bytes or 0) / _GIB:.1f} GiB"
    time, chips = figures.seconds(), figures.slice.num_chips
    rates = (f"{figures.tokens / seconds / chips:,.0f}" for seconds in (time.overlapped, time.in_turn))
    return f"{(figures.needed_bytes or 0) / _GIB:.1f} GiB; {' / '.join(rates)}"


def scaling(rows: Iterable[Figures]) -> str:
    """Return what passes with gradients send, and what limits them."""
    head = _header(
        "Model", "Slice", "Mesh", "Tokens a call", "GiB received by a chip: weights", "activations", "gradients",
        "KiB received by all chips for a token", "ms of compute, HBM, links", "Links as long as compute at",
        "Compiler",
    )  # fmt: skip
    chosen = (row for row in rows if row.program == "gradients" and row.slice.num_chips > 1 and row.compiled)
    return "\n".join((*head, *map(_scaling_row, chosen)))


def _scaling_row(figures: Figures) -> str:
    assert figures.compiled is not None, "the caller has looked"
    sent = figures.compiled.collectives
    weights = sum(each.received for each in sent if each.kind == "all-gather")
    activations = sum(each.received for each in sent if each.kind == "all-reduce" and each.axis == "tensor")
    gradients = sum(
        each.received for each in sent if each.kind in ("all-reduce", "reduce-scatter") and each.axis != "tensor"
    )
    per_token = sum(each.received for each in sent) * figures.slice.num_chips / figures.tokens / 1024
    time = figures.seconds()
    balanced = f"{figures.options.tokens * time.links / time.compute:,.0f} tokens a stream"
    return _cells(
        figures.options.model,
        figures.options.topology,
        mesh_text(figures),
        f"{figures.tokens:,}",
        *(f"{num_bytes / _GIB:.2f}" for num_bytes in (weights, activations, gradients)),
        f"{per_token:,.0f}",
        _times(figures),
        "" if activations else balanced,  # activations grow with the tokens
        figures.compiler,
    )


def sampling(rows: Iterable[Figures]) -> str:
    """Return what sampling costs, a row for each slice and mesh: decoding, and reading prompts."""
    found: dict[str, dict[str, Figures]] = defaultdict(dict)
    for row in rows:
        found[row.options.model_dump_json()][row.program] = row
    head = _header(
        "Model", "Slice", "Mesh", "Slots", "GiB a chip: base", "cache and adapters", "decoding, of", "Fits",
        "ms of compute, HBM, links for a token of each slot", "Tokens/s drawn, overlapped", "in turn", "read, in turn",
        "Compiler",
    )  # fmt: skip
    pairs = (pair for pair in found.values() if pair.keys() >= {"decode", "prefill"})
    return "\n".join((*head, *map(_sampling_row, pairs)))


def _sampling_row(pair: Mapping[str, Figures]) -> str:
    decode, prefill = pair["decode"], pair["prefill"]
    options, facts = decode.options, decode.facts
    slots = options.slots * facts.streams
    held = (f"{num_bytes / _GIB:.1f}" for num_bytes in (facts.base_bytes, facts.sampling_bytes))
    mesh = mesh_text(decode) + (", gathered once" if facts.gathers_once else "")
    first = (options.model, options.topology, mesh, f"{slots:,}", *held)
    if decode.compiled is None or prefill.compiled is None:
        return _cells(*first, "more than there is", "**no**", *[""] * 4, _compilers(pair.values()))
    fits = decode.fits and prefill.fits
    speeds = (
        f"{decode.tokens / decode.seconds().overlapped:,.0f}",
        f"{decode.tokens / decode.seconds().in_turn:,.0f}",
        f"{prefill.tokens / prefill.seconds().in_turn:,.0f}",
    )
    return _cells(
        *first,
        _of_chip(decode),
        "yes" if fits else "**no**",
        _times(decode, decode.tokens / slots),
        *(speeds if fits and not (decode.doubt or prefill.doubt) else [""] * 3),
        _compilers(pair.values()),
    )


TABLES: Final[Mapping[str, Callable[[Iterable[Figures]], str]]] = {
    "passes": passes,
    "slices": slices,
    "scaling": scaling,
    "sampling": sampling,
}
"""By the names that compile-table knows."""


def _of_chip(figures: Figures) -> str:
    return f"{(figures.needed_bytes or 0) / _GIB:.1f} of {figures.slice.chip.hbm_bytes / _GIB:.1f}"


def _times(figures: Figures, parts: float = 1) -> str:
    """Return the milliseconds of compute, HBM and links for one of the parts of a call, the longest in bold."""
    if figures.doubt:
        return "not believed"
    time = figures.seconds()
    digits = 0 if parts == 1 else 2
    texts = (f"{1e3 * each / parts:.{digits}f}" for each in time)
    return ", ".join(f"**{text}**" if each == time.overlapped else text for text, each in zip(texts, time, strict=True))


def _header(*names: str) -> tuple[str, str]:
    return _cells(*names), f"|{'---|' * len(names)}"


def _cells(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"
