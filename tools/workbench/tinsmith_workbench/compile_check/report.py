"""Figures as text for people."""

from collections.abc import Sequence
from typing import Final

from tinsmith_workbench.compile_check.figures import Figures, Sent

_GIB: Final = 1 << 30


def heading(figures: Figures) -> str:
    """Report the question, and the arrays that lie on each chip whatever runs."""
    options, facts = figures.options, figures.facts
    held = [
        f"base {_gib(facts.base_bytes)}",
        f"{options.tenants} tenants {_gib(options.tenants * facts.tenant_bytes)} (weights, moments, gradients)",
        f"zeros {_gib(facts.zeros_bytes)}",
        *(
            [f"{options.slots} slots a stream {_gib(facts.sampling_bytes)} (keys, values, adapters)"]
            if options.slots
            else []
        ),
    ]
    return "\n".join(
        (
            f"{options.model} on {options.topology} ({figures.slice.num_chips} chips), mesh {mesh_text(figures)}",
            f"{options.tenants} tenants of rank {options.rank}, {facts.adapters} in a call; {facts.streams} streams of"
            f" {options.tokens} tokens, sequences of up to {options.context}",
            f"held on each chip: {', '.join(held)}",
            f"compiled by {figures.compiler}",
        )
    )


def paragraph(figures: Figures) -> str:
    """Describe one program."""
    made = figures.compiled
    if made is None or figures.needed_bytes is None:
        return f"{figures.program}\n  does not fit: {figures.error}"
    lines = [
        _fit(figures),
        f"arguments {_gib(made.argument_bytes)}, results {_gib(made.result_bytes)}, temporaries"
        f" {_gib(made.temporary_bytes)}",
        *([_flops(figures, made.flops)] if figures.facts.formula else []),
        *(f"{each.kind} over {each.axis}: {_sent(each)}" for each in made.collectives),
        *_unplanned(figures, made.collectives),
        _time(figures),
    ]
    return "\n  ".join([figures.program, *lines])


def _fit(figures: Figures) -> str:
    assert figures.free_bytes is not None, "the caller has looked"
    assert figures.needed_bytes is not None, "as above"
    verdict = f"{_gib(figures.free_bytes)} free" if figures.fits else f"{_gib(-figures.free_bytes)} too much"
    word = "fits" if figures.fits else "does not fit"
    return f"{word}: {_gib(figures.needed_bytes)} of {_gib(figures.slice.chip.hbm_bytes)} on each chip, {verdict}"


def _flops(figures: Figures, flops: float) -> str:
    terms = figures.facts.formula
    off = 100 * (flops / figures.formula_flops - 1)
    hidden = " (attention is in a kernel, whose arithmetic is not seen)" if figures.facts.attention_is_hidden else ""
    parts = ", ".join(f"{name} {value / 1e12:.2f}" for name, value in terms.items())
    return f"{flops / 1e12:.2f} TFLOP, {off:+.1f} % of the formula{hidden}: {parts}"


def _sent(sent: Sent) -> str:
    return f"{sent.count} arrays, {_gib(sent.num_bytes)}; a chip receives {_gib(int(sent.received))}"


def _unplanned(figures: Figures, collectives: Sequence[Sent]) -> list[str]:
    """Name what differs from the plan (formula.py)."""
    planned = {(kind, axis): count for kind, axis, count in figures.facts.planned}
    found = {(each.kind, each.axis): each.count for each in collectives}
    return [
        f"not as planned: {kind} over {axis}: {found.get((kind, axis), 0)} arrays instead of"
        f" {planned.get((kind, axis), 0)}"
        for kind, axis in sorted(planned.keys() | found.keys())
        if planned.get((kind, axis), 0) != found.get((kind, axis), 0)
    ]


def _time(figures: Figures) -> str:
    if figures.doubt is not None:
        return figures.doubt
    time = figures.seconds()
    parts = f"compute {_ms(time.compute)}, HBM {_ms(time.hbm)}, links {_ms(time.links)}"
    if not figures.tokens:
        return f"at the roofline {_ms(time.overlapped)}: {parts}"
    return (
        f"at the roofline {_ms(time.overlapped)} ({parts}): {figures.tokens / time.overlapped:,.0f} tokens/s, model"
        f" FLOPs {share(figures, time.overlapped)} of the peak; {figures.tokens / time.in_turn:,.0f} tokens/s and"
        f" {share(figures, time.in_turn)} if nothing is computed during collectives"
    )


def mesh_text(figures: Figures) -> str:
    """Return the axes of more than one shard."""
    axes = [f"{axis}={size}" for axis, size in figures.options.mesh.model_dump().items() if size > 1]
    return ",".join(axes) or "one chip"


def share(figures: Figures, seconds: float) -> str:
    return f"{100 * figures.facts.model_flops / seconds / figures.slice.chip.flops:.0f} %"


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.1f} ms"


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / _GIB:.2f} GiB"
