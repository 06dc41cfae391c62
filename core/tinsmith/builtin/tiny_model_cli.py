"""`tinsmith tiny-model`: a model for trying things out."""

from pathlib import Path
from typing import Annotated, Final, cast, get_args

import typer

from tinsmith.errors import UserError
from tinsmith_checkpoints.huggingface.tiny_model import Family, TinyShape, write_tiny_model

_TINY: Final = TinyShape()


def tiny_model(
    directory: Annotated[Path, typer.Argument(help="where to write it")],
    family: Annotated[str, typer.Option(help=f"one of {', '.join(get_args(Family))}")] = "qwen3",
    vocab_size: int = _TINY.vocab_size,
    hidden_size: int = _TINY.hidden_size,
    intermediate_size: int = _TINY.intermediate_size,
    num_layers: int = _TINY.num_layers,
    num_heads: int = _TINY.num_heads,
    num_kv_heads: int = _TINY.num_kv_heads,
    head_dim: int = _TINY.head_dim,
    max_context_tokens: int = _TINY.max_context_tokens,
    tied: Annotated[bool, typer.Option(help="use the embedding as output head")] = True,
    seed: int = _TINY.seed,
    force: Annotated[bool, typer.Option("--force", help="overwrite existing files")] = False,
) -> None:
    """Write a tiny random model with a tokenizer, in Hugging Face format: for trying things out."""
    shape = TinyShape(
        family=cast("Family", family),
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=intermediate_size,
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        max_context_tokens=max_context_tokens,
        tied=tied,
        seed=seed,
    )
    try:
        num_parameters = write_tiny_model(directory, shape, overwrite=force)
    except OSError as error:
        msg = f"{str(directory)!r} cannot be written: {error.strerror}; choose another directory"
        raise UserError(msg) from error
    typer.echo(f"wrote a {family} with {num_parameters:,} random parameters to {directory}")
