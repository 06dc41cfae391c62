"""The commands `tinsmith rehearse` and `tinsmith rehearsal-table`."""

import warnings
from pathlib import Path
from typing import Annotated

import typer

from tinsmith import ConfigError
from tinsmith_workbench.rehearsal import rows


def rehearse(
    model: Annotated[str, typer.Option(help="a directory with config.json, or Qwen3-8B, Llama-3-70B, ...")],
    cards: Annotated[list[int], typer.Option(min=1, help="may be repeated")],
    tenants: Annotated[int, typer.Option(min=1, help="models in training")] = 1,
    rank: Annotated[int, typer.Option(min=0, help="of each adapter; 0: full fine-tuning of one model")] = 32,
    sequences: Annotated[int, typer.Option(min=1, help="of a micro-batch of each card, for the tenants in turn")] = 16,
    length: Annotated[int, typer.Option(min=1, help="tokens of each sequence")] = 512,
    layers: Annotated[int | None, typer.Option(min=1, help="instead of all of the model's")] = None,
    shard_size: Annotated[
        int | None, typer.Option(min=1, help="cards that divide the weights, the others have replicas; default all")
    ] = None,
    json: Annotated[Path | None, typer.Option(help="append the figures to this file, a line for each")] = None,
) -> None:
    """Run a training step of the real program on tensors without contents: its memory, and the bytes it sends."""
    warnings.filterwarnings("ignore", category=UserWarning)  # of fake tensors, about operations that they lack
    if rank == 0 and tenants > 1:
        msg = f"--tenants {tenants} --rank 0: one fully trained model at a time, leave out --tenants"
        raise ConfigError(msg)
    for number in cards:
        work = rows.Work(
            model=model,
            cards=number,
            tenants=tenants,
            rank=rank,
            sequences=sequences,
            length=length,
            layers=layers,
            shard_size=shard_size,
        )
        row = rows.row_of(work)
        typer.echo(rows.sentence(row))
        if json is not None:
            with json.open("a", encoding="utf-8") as file:
                file.write(row.model_dump_json() + "\n")


def rehearsal_table(
    files: Annotated[list[Path], typer.Argument(exists=True, dir_okay=False, help="what rehearse --json has written")],
    model: Annotated[str, typer.Option(help="whose figures")],
    replicas: Annotated[bool, typer.Option(help="those of runs with --shard-size")] = False,
) -> None:
    """Print figures of several runs as a Markdown table."""
    found = rows.read_lines("\n".join(file.read_text(encoding="utf-8") for file in files))
    typer.echo(rows.table(found, model, replicas=replicas))
