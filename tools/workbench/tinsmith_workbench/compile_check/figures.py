"""A compiled program's figures: whether it fits, and its cost."""

import importlib.metadata
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Final, NamedTuple

from pydantic import BaseModel, ConfigDict

from tinsmith_workbench.compile_check.chips import Slice, read_slice
from tinsmith_workbench.compile_check.collectives import traffic
from tinsmith_workbench.compile_check.hlo import Trips, read_module
from tinsmith_workbench.compile_check.options import Options
from tinsmith_workbench.compile_check.work import hbm_bytes, product_flops

PLANNED: Final = "*.after_optimizations_after_buffer_assignment.txt"
"""The last file that the compiler writes before it generates code. Those that are read are complete by then."""

_FLOPS: Final = (0.9, 1.1)
_BYTES: Final = (0.75, 1.33)
_BYTES_OF_PASSES: Final = (0.6, 1.45)  # how much of a short stream stays on the chip differs
"""The share of the counted figures that a correctly read program may show. The rows in docs/reference/tpu.jsonl have
0.96 to 1 of FLOPs, 0.84 to 1.21 of bytes, and passes 0.75 to 1.17. One of 4,096 tokens on v5e, which is not there, has
0.62."""

_PROGRAM: Final = "*.after_optimizations.txt"
_REPORT: Final = "*.after_optimizations-memory-usage-report.txt"
_TOTAL: Final = re.compile(r"^Total bytes: (\d+)", re.MULTILINE)


class Facts(BaseModel):
    """Figures of a program before compilation; bytes on one chip."""

    model_config = ConfigDict(frozen=True)

    base_bytes: int
    tenant_bytes: int
    zeros_bytes: int
    sampling_bytes: int  # cache and adapters of all slots
    state_bytes: int  # arguments of the program that are among the above
    streams: int
    adapters: int
    formula: dict[str, float]
    counted_hbm_bytes: dict[str, float]
    model_flops: float
    tokens: int  # of a call, over all chips; 0 if none are read
    trips: dict[str, float]  # hlo.Trips
    links: dict[str, float]  # of a chip that a collective over an axis can receive from
    attention_is_hidden: bool
    gathers_once: bool = False  # decoding: all weights at the start of a dispatch
    planned: list[tuple[str, str, int]]


class Sent(BaseModel):
    """Collectives of one kind over one axis (collectives.Traffic)."""

    kind: str
    axis: str
    count: int
    num_bytes: int
    received: float


class Compiled(BaseModel):
    """The compiler's figures, on one chip."""

    argument_bytes: int
    result_bytes: int  # without those that take the place of an argument
    temporary_bytes: int
    flops: float
    hbm_bytes: float  # an estimate
    collectives: list[Sent]


class Seconds(NamedTuple):
    """How long one part of the chip has to work at its full rate."""

    compute: float
    hbm: float
    links: float

    @property
    def limit(self) -> str:
        return max(zip(self, ("compute", "HBM", "links"), strict=True))[1]

    @property
    def overlapped(self) -> float:
        return max(self)

    @property
    def in_turn(self) -> float:
        """Return the time if nothing is computed while data are on their way."""
        return max(self.compute, self.hbm) + self.links


class Figures(BaseModel):
    """One program. `compiled` is None if the compiler gave up, and `error` says why."""

    model_config = ConfigDict(frozen=True)

    options: Options
    program: str
    facts: Facts
    compiled: Compiled | None
    error: str | None = None
    has_code: bool = False  # compiled to the end, not only until memory was planned
    compiler: str = ""  # "jax 0.10.2, libtpu 0.0.42.1"; others plan other programs

    @property
    def slice(self) -> Slice:
        return read_slice(self.options.topology)

    @property
    def held_bytes(self) -> int:
        """Return what lies on a chip whatever runs: the base, the state of all tenants, and the slots of sampling."""
        facts = self.facts
        return facts.base_bytes + self.options.tenants * facts.tenant_bytes + facts.zeros_bytes + facts.sampling_bytes

    @property
    def needed_bytes(self) -> int | None:
        """Return what must fit into HBM while the program runs, or None if the compiler does not say."""
        if self.compiled is None:
            return None
        made = self.compiled
        own = made.argument_bytes - self.facts.state_bytes + made.result_bytes + made.temporary_bytes
        return self.held_bytes + own

    @property
    def free_bytes(self) -> int | None:
        """Return what is left of HBM; negative if the program does not fit."""
        return None if self.needed_bytes is None else self.slice.chip.hbm_bytes - self.needed_bytes

    @property
    def fits(self) -> bool:
        return self.free_bytes is not None and self.free_bytes >= 0

    @property
    def tokens(self) -> int:
        """Return the tokens of a call, over all chips."""
        return self.facts.tokens

    @property
    def formula_flops(self) -> float:
        """Return what the program's text should show."""
        hidden = self.facts.formula.get("attention", 0) if self.facts.attention_is_hidden else 0
        return sum(self.facts.formula.values()) - hidden

    @property
    def doubt(self) -> str | None:
        """Return why the time is not believed, because the program is read as another than counted. None: it is."""
        if self.compiled is None:
            return None
        made, counted = self.compiled, sum(self.facts.counted_hbm_bytes.values())
        bytes_believed = _BYTES_OF_PASSES if self.program in ("gradients", "score") else _BYTES
        for what, found, expected, (least, most) in (
            ("move", made.hbm_bytes, counted, bytes_believed),
            ("compute", made.flops, self.formula_flops, _FLOPS),
        ):
            if expected and not least <= found / expected <= most:
                return (
                    f"no time is told: the program seems to {what} {found / expected:,.2f} times what is counted for"
                    f" its shape, so {self.compiler or 'its compiler'} writes it in a way that is not understood"
                )
        return None

    def seconds(self) -> Seconds:
        assert self.compiled is not None, "what the compiler gave up takes no time"
        chip, made = self.slice.chip, self.compiled
        hidden = sum(self.facts.formula.values()) - self.formula_flops
        return Seconds(
            compute=(made.flops + hidden) / chip.flops,
            hbm=made.hbm_bytes / chip.hbm_rate,
            links=sum(sent.received / self.facts.links.get(sent.axis, 1) for sent in made.collectives) / chip.link_rate,
        )


def read_figures(options: Options, program: str, place: Path, *, has_code: bool) -> Figures:
    """Read what the compiling process and the compiler have left in a directory."""
    facts = Facts.model_validate_json((place / "facts.json").read_bytes())
    error = place / "error.txt"
    if error.exists():
        text = error.read_text(encoding="utf-8")
        return Figures(
            options=options, program=program, facts=facts, compiled=None, error=_first_line(text), compiler=compiler()
        )
    text = next(place.glob(_PROGRAM)).read_text(encoding="utf-8")
    total = _TOTAL.search(next(place.glob(_REPORT)).read_text(encoding="utf-8"))
    assert total is not None, "the compiler's report of memory begins with the total"
    mesh = options.mesh
    compiled = analysed(
        text, int(total.group(1)), {"data": mesh.data, "fsdp": mesh.fsdp, "tensor": mesh.tensor}, facts.trips
    )
    return Figures(
        options=options,
        program=program,
        facts=facts,
        compiled=compiled,
        has_code=has_code,
        compiler=compiler(),
    )


def compiler() -> str:
    """Return the releases that decide what is compiled."""
    return ", ".join(f"{name} {importlib.metadata.version(name)}" for name in ("jax", "libtpu"))


def analysed(text: str, total_bytes: int, mesh: Mapping[str, int], trips: Trips) -> Compiled:
    """Count what an optimized program does."""
    module = read_module(text)
    arguments = sum(array.num_bytes for array in module.arguments)
    results = sum(array.num_bytes for index, array in enumerate(module.results) if index not in module.donated)
    return Compiled(
        argument_bytes=arguments,
        result_bytes=results,
        temporary_bytes=total_bytes - arguments - results,
        flops=product_flops(module, trips),
        hbm_bytes=hbm_bytes(module, trips),
        collectives=[
            Sent(kind=each.kind, axis=each.axis, count=each.count, num_bytes=each.num_bytes, received=each.received)
            for each in traffic(module, mesh, trips)
        ],
    )


def _first_line(text: str) -> str:
    return next((line for line in text.splitlines() if line.strip()), "the compiler gives no reason")
