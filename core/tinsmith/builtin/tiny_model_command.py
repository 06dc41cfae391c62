"""The command `tinsmith tiny-model`, added as a stranger's plugin would add one: a model for trying things out."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from tinsmith.errors import UserError
from tinsmith.hookspecs import hookimpl

if TYPE_CHECKING:
    from typer import Typer


@hookimpl
def tinsmith_register_commands(group: "Typer") -> None:
    import typer  # here, since other processes make no models

    from tinsmith_checkpoints.huggingface.tiny_classes import TINY_CLASSES
    from tinsmith_checkpoints.huggingface.tiny_model import FAMILIES, TinyShape, write_tiny_model

    tiny = TinyShape()
    known = f"one of {', '.join(FAMILIES)}; or, with torch and transformers, a class: {', '.join(TINY_CLASSES)}"

    @group.command("tiny-model")
    def tiny_model(
        directory: Annotated[Path, typer.Argument(help="where to write it")],
        family: Annotated[str, typer.Option(help=known)] = "qwen3",
        vocab_size: int = tiny.vocab_size,
        hidden_size: int = tiny.hidden_size,
        intermediate_size: int = tiny.intermediate_size,
        num_layers: int = tiny.num_layers,
        num_heads: int = tiny.num_heads,
        num_kv_heads: int = tiny.num_kv_heads,
        head_dim: int = tiny.head_dim,
        max_context_tokens: int = tiny.max_context_tokens,
        tied: Annotated[bool, typer.Option(help="use the embedding as output head")] = True,
        seed: int = tiny.seed,
        force: Annotated[bool, typer.Option("--force", help="overwrite existing files")] = False,
    ) -> None:
        """Write a tiny random model with a tokenizer, in Hugging Face format: for trying things out."""
        shape = TinyShape(
            family=family,
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
