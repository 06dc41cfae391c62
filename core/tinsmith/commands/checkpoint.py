"""`tinsmith checkpoint ...`: inspects, verifies, converts, exports, merges and imports checkpoints."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Final, Literal

import typer
from rich.console import Console
from rich.progress import Progress as Bar
from rich.progress import SpinnerColumn, TextColumn
from rich.table import Table

from tinsmith.checkpoints import atomic_directory, importing
from tinsmith.checkpoints.tinker_path import TinkerPath, newest_on_disk
from tinsmith.commands.open_store import use_store
from tinsmith.commands.options import (
    AsJson,
    ConfigFile,
    DataDir,
    base_model_name_of,
    plugins_of,
    settings_without_models,
)
from tinsmith.errors import ConfigError, UserError
from tinsmith.processes.logs import console as new_console
from tinsmith.processes.logs import escape, printable
from tinsmith.settings import Settings
from tinsmith_checkpoints.format import SHARD_BYTES
from tinsmith_checkpoints.huggingface.safetensors_files import DTYPES
from tinsmith_checkpoints.tools import rewriting, verifying
from tinsmith_checkpoints.tools.contents import Contents, described, open_contents
from tinsmith_checkpoints.values import Json

_FAULTY: Final = 1
_SHARD_MB: Final = SHARD_BYTES >> 20

PATH_HELP = "checkpoint directory, or a tinker:// path in the server's data directory"
Where = Annotated[str, typer.Argument(metavar="PATH", help=PATH_HELP)]
Output = Annotated[Path, typer.Argument(help="directory to write")]
BaseModel = Annotated[
    str | None, typer.Option(help="directory or name of the base model; default: from the checkpoint")
]
Dtype = Annotated[str | None, typer.Option(help="float32, float16 or bfloat16; default: unchanged")]
ShardMb = Annotated[int, typer.Option(min=1, help="size of the largest weights file, in MiB")]
Head = Annotated[
    Literal["lm_head", "unembed_tokens"],
    typer.Option(help="name of the output head; tinker-cookbook merges unembed_tokens into a tied model"),
]
Force = Annotated[bool, typer.Option("--force", help="overwrite existing files")]


def add_checkpoint_commands(group: typer.Typer) -> None:
    commands = typer.Typer(
        help="Inspect, verify, convert, export, merge and import checkpoints.",
        no_args_is_help=True,
        pretty_exceptions_enable=False,
    )
    commands.command("show")(show)
    commands.command("verify")(verify)
    commands.command("convert")(convert)
    commands.command("export-peft")(export_peft)
    commands.command("merge")(merge)
    commands.command("import")(import_weights)
    group.add_typer(commands, name="checkpoint")


def show(
    context: typer.Context, path: Where, as_json: AsJson = False, config: ConfigFile = None, data_dir: DataDir = None
) -> None:
    """Print a checkpoint's metadata and its tensors. Reads no weights."""
    told = described(_open(context, path, config, data_dir))
    if as_json:
        typer.echo(json.dumps(told, indent=2))
        return
    console = Console(highlight=False, soft_wrap=True, emoji=False)  # paths contain :train:
    for key in ("kind", "base_model", "step", "created_at", "format_version", "target_modules", "directory"):
        if told[key] is not None:
            console.print(f"[bold]{key.replace('_', ' ')}[/]  {escape(str(told[key]))}")
    if told["lora"]:
        console.print(f"[bold]lora[/]  {escape(', '.join(f'{name} {value}' for name, value in told['lora'].items()))}")
    for what, tensors in told["tensors"].items():
        if tensors:
            _print_tensors(console, what, tensors)
    for name, file in told["files"].items():
        console.print(f"{escape(name)}  {file['size']:,} bytes  {escape(file['sha256'] or '')}")


def _print_tensors(console: Console, what: str, tensors: dict[str, dict[str, Json]]) -> None:
    total = sum(each["bytes"] for each in tensors.values())
    table = Table(f"{what} ({len(tensors)}, {total:,} bytes)", "dtype", "shape", box=None, pad_edge=False)
    for name, each in tensors.items():
        table.add_row(escape(name), escape(each["dtype"]), " x ".join(map(str, each["shape"])))
    console.print(table)


def verify(
    context: typer.Context,
    path: Where,
    base_model: BaseModel = None,
    as_json: AsJson = False,
    config: ConfigFile = None,
    data_dir: DataDir = None,
) -> None:
    """Check names, shapes, values, optimizer moments and checksums. List every fault; exit with 1 if there are any.

    Names and shapes are compared with the base model, if it is found.
    """
    contents = _open(context, path, config, data_dir)
    directory = _find_base(context, base_model or contents.base_model)
    if base_model is not None and directory is None:
        msg = f"no base model {base_model!r}: it is not a directory, and no plugin knows the name; pass its directory"
        raise UserError(msg)
    with _progress("verifying") as progress:
        found = list(verifying.faults(contents, directory, progress))
    if as_json:
        typer.echo(json.dumps({"faults": found, "base_model": directory and str(directory)}, indent=2))
    else:
        for fault in found:
            typer.echo(printable(fault))
        compared = f"compared with {directory}" if directory else "not compared with a base model (--base-model)"
        typer.echo(f"{len(found) or 'no'} fault{'s' * (len(found) != 1)} in {contents.kind}, {compared}")
    if found:
        raise typer.Exit(_FAULTY)


def convert(
    context: typer.Context,
    path: Where,
    output: Output,
    dtype: Dtype = None,
    shard_mb: ShardMb = _SHARD_MB,
    force: Force = False,
    config: ConfigFile = None,
    data_dir: DataDir = None,
) -> None:
    """Rewrite a checkpoint: in another dtype, in files of another size, or in the newest format version."""
    contents = _open(context, path, config, data_dir)
    with _progress("converting") as progress:
        rewriting.convert(
            contents, output, dtype=_dtype(dtype), shard_bytes=shard_mb << 20, force=force, progress=progress
        )
    typer.echo(f"wrote {output}")


def export_peft(
    context: typer.Context,
    path: Where,
    output: Output,
    base_model: BaseModel = None,
    head: Head = "lm_head",
    force: Force = False,
    config: ConfigFile = None,
    data_dir: DataDir = None,
) -> None:
    """Write an adapter in the form that PEFT and vLLM load."""
    contents = _open(context, path, config, data_dir)
    with _progress("exporting") as progress:
        rewriting.export_peft(contents, output, base_model=base_model, force=force, progress=progress, head=head)
    named = base_model or contents.base_model or ""
    if not Path(named, "config.json").is_file():
        typer.echo(
            f"note: {named!r} is no directory of a model here, so modules are named as in Llama; for a base model that "
            "joins its projections (Phi-3, Qwen3-Next) or also sees, pass its directory with --base-model",
            err=True,
        )
    typer.echo(f"wrote {output}")


def merge(
    context: typer.Context,
    path: Where,
    output: Output,
    base_model: BaseModel = None,
    dtype: Dtype = None,
    shard_mb: ShardMb = _SHARD_MB,
    force: Force = False,
    config: ConfigFile = None,
    data_dir: DataDir = None,
) -> None:
    """Merge an adapter into its base weights and write a Hugging Face model. A trained output head is untied."""
    contents = _open(context, path, config, data_dir)
    base = _need_base(context, base_model or contents.base_model)
    with _progress("merging") as progress:
        merged = rewriting.merge(
            contents,
            base,
            output,
            dtype=_dtype(dtype),
            shard_bytes=shard_mb << 20,
            force=force,
            progress=progress,
        )
    typer.echo(f"wrote {output}: {len(merged)} weights changed")


def import_weights(
    context: typer.Context,
    path: Where,
    base_model: Annotated[str, typer.Option(help="its base model: a directory, or the name that clients use")],
    name: Annotated[str, typer.Option(help="name of the new checkpoint")],
    base_path: Annotated[Path | None, typer.Option(help="directory of the base model; default: by name")] = None,
    tenant: Annotated[str | None, typer.Option(help="tenant that may use it; or pass --api-key")] = None,
    api_key: Annotated[str | None, typer.Option(envvar="TINKER_API_KEY", help="API key of that tenant")] = None,
    fill_missing: Annotated[bool, typer.Option(help="add missing modules, with no effect at first")] = False,
    force: Force = False,
    config: ConfigFile = None,
    data_dir: DataDir = None,
) -> None:
    """Import a PEFT adapter or a whole Hugging Face model into the server's data directory.

    Clients of the tenant can create training clients from the printed paths, and sample from them.
    """
    settings = settings_without_models(context, config, data_dir)
    served = next((model for model in settings.models if model.name == base_model), None)
    directory = base_path or (served and served.path) or _need_base(context, base_model)
    request = importing.Import(
        contents=_open(context, path, config, data_dir),
        name=name,
        tenant=tenant or _tenant_of(settings, api_key),
        base_model=base_model if served else base_model_name_of(base_model),
        base_path=directory,
        fill_missing=fill_missing,
        force=force,
    )
    root = settings.data_dir.checkpoints
    with _progress("importing") as progress:
        records = use_store(
            settings,
            plugins_of(context),
            lambda store: importing.run_import(request, store, root, progress),
            create=True,
        )
    for record in records:
        typer.echo(record.path)


def _tenant_of(settings: Settings, api_key: str | None) -> str:
    from tinsmith.server.api_keys import owner_of  # here, because it imports cryptography

    if api_key is None:
        msg = "pass the tenant that may use it: --tenant NAME, or --api-key KEY (TINKER_API_KEY)"
        raise UserError(msg)
    return owner_of(api_key, settings.server.api_keys).tenant


def _open(context: typer.Context, path: str, config: Path | None, data_dir: Path | None) -> Contents:
    if not path.startswith("tinker://"):
        return open_contents(Path(path).expanduser())
    settings, wanted = settings_without_models(context, config, data_dir), TinkerPath.parse(path)
    root = settings.data_dir.checkpoints
    try:
        record = use_store(settings, plugins_of(context), lambda store: store.get_checkpoint(str(wanted)))
        directory = record.directory
    except ConfigError:  # no store: a copy of the checkpoints alone
        directory = newest_on_disk(root, wanted)
    return open_contents(atomic_directory.find(root, directory))


def _find_base(context: typer.Context, name: str | None) -> Path | None:
    if name is None:
        return None
    directory = Path(name).expanduser()
    return directory if directory.is_dir() else plugins_of(context).resolve_base_model(name)


def _need_base(context: typer.Context, name: str | None) -> Path:
    directory = _find_base(context, name)
    if directory is None:
        found = f"no base model {name!r} on this machine" if name else "the checkpoint names no base model"
        msg = f"{found}; pass its directory with --base-model"
        raise UserError(msg)
    return directory


def _dtype(name: str | None) -> str | None:
    if name is not None and name not in DTYPES:
        msg = f"unknown dtype {name!r}; use one of {', '.join(DTYPES)}"
        raise UserError(msg)
    return name


@contextmanager
def _progress(what: str) -> Iterator[rewriting.Progress]:
    """Show the tensor being processed on stderr, if that is a terminal."""
    console = new_console(stderr=True)
    columns = (SpinnerColumn(), TextColumn("{task.description}", markup=False))
    with Bar(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(what)
        yield lambda name: bar.update(task, description=f"{what} {printable(name)}")
