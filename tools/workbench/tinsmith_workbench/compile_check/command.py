"""The commands `tinsmith compile-check` and `tinsmith compile-table`."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from pydantic import ValidationError

from tinsmith import ConfigError
from tinsmith_workbench.compile_check.compiling import compile_program, largest_that_fits, require_compiler
from tinsmith_workbench.compile_check.options import PROGRAMS, TRAINING, Options, read_mesh
from tinsmith_workbench.compile_check.report import heading, paragraph
from tinsmith_workbench.compile_check.tables import TABLES, read_lines


def compile_check(
    topology: Annotated[str, typer.Option(help="the slice, for example v6e:4x4, v5p:2x2x1 or v5e:1x1")],
    model: Annotated[str, typer.Option(help="a directory with config.json, or Qwen3-8B, Llama-3-70B, ...")],
    mesh: Annotated[str, typer.Option(help="the axes, for example fsdp=4,tensor=4")] = "fsdp=1",
    tenants: Annotated[int, typer.Option(min=1, help="models in training; up to eight share a call")] = 1,
    rank: Annotated[int, typer.Option(min=1, help="of each adapter")] = 32,
    context: Annotated[int, typer.Option(min=64, help="tokens of the longest sequence")] = 2048,
    tokens: Annotated[
        int | None, typer.Option(min=128, help="of a stream in a call; default the largest power of two that fits")
    ] = None,
    slots: Annotated[
        int, typer.Option(min=0, help="sequences sampled at a time by each stream; 0: training alone")
    ] = 16,
    program: Annotated[list[str] | None, typer.Option(help=f"{', '.join(PROGRAMS)}; default all")] = None,
    kernels: Annotated[str, typer.Option(help="of the device, or reference: without Pallas")] = "device",
    recompute: Annotated[bool, typer.Option(help="compute activations again in the backward pass")] = True,
    gather_once: Annotated[
        bool | None, typer.Option(help="decoding gathers all weights at its start; default as in the settings")
    ] = None,
    code: Annotated[
        bool, typer.Option(help="generate code; else stop when memory is planned, in a third of the time")
    ] = True,
    json: Annotated[Path | None, typer.Option(help="append the figures to this file, a line for each program")] = None,
) -> None:
    """Compile training and sampling for a TPU slice, without a TPU: what fits, what it costs, how fast it could be."""
    require_compiler()
    options = _options(
        topology=topology, model=model, mesh=read_mesh(mesh), tenants=tenants, rank=rank, context=context,
        tokens=tokens or context, slots=slots, recompute=recompute, kernels=kernels,
        gather_once=gather_once,
    )  # fmt: skip
    programs = _known(program or (PROGRAMS if slots else TRAINING), slots)
    if tokens is None:
        options = options.model_copy(update={"tokens": _find_tokens(options)})
    for number, name in enumerate(programs):
        figures = compile_program(options, name, code=code)
        typer.echo(f"{paragraph(figures)}" if number else f"{heading(figures)}\n\n{paragraph(figures)}")
        if json is not None:
            with json.open("a", encoding="utf-8") as file:
                file.write(figures.model_dump_json() + "\n")


def compile_table(
    files: Annotated[
        list[Path], typer.Argument(exists=True, dir_okay=False, help="what compile-check --json has written")
    ],
    kind: Annotated[str, typer.Option(help=", ".join(TABLES))] = "passes",
) -> None:
    """Print figures of several runs as a Markdown table."""
    if kind not in TABLES:
        msg = f"--kind {kind!r}: no such table, known: {', '.join(TABLES)}"
        raise ConfigError(msg)
    typer.echo(TABLES[kind](read_lines("\n".join(file.read_text(encoding="utf-8") for file in files))))


def _options(**values: object) -> Options:
    """Raise ConfigError for values that make no sense."""
    try:
        return Options.model_validate(values)
    except ValidationError as error:
        first = error.errors()[0]
        msg = f"--{first['loc'][0]} {first['input']!r}: {first['msg'][0].lower()}{first['msg'][1:]}"
        raise ConfigError(msg) from error


def _known(names: Sequence[str], slots: int) -> Sequence[str]:
    if unknown := [name for name in names if name not in PROGRAMS]:
        msg = f"no program named {unknown[0]!r}, known: {', '.join(PROGRAMS)}"
        raise ConfigError(msg)
    if asked := [name for name in names if not slots and name not in TRAINING]:
        msg = f"--program {asked[0]}: without slots nothing is sampled, choose --slots 1 or more"
        raise ConfigError(msg)
    return names


def _find_tokens(options: Options) -> int:
    """Return the most tokens with which a pass with gradients fits, or if none does, the fewest."""
    best = options.tokens
    for figures in largest_that_fits(options, "gradients"):
        typer.echo(
            f"gradients of {figures.options.tokens} tokens: {'fits' if figures.fits else 'does not fit'}", err=True
        )
        best = figures.options.tokens if figures.fits else best
    return best
