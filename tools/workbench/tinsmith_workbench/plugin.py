"""The workbench's commands. Imported in every process: what they import is imported for the command line alone."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Final, NamedTuple

from tinsmith import ConfigError, hookimpl

if TYPE_CHECKING:
    import typer


class _Command(NamedTuple):
    module: str  # which has a function of its name
    backend: str | None = None  # whose distribution it computes with


COMMANDS: Final = {
    "simulate": _Command("simulation"),
    "rehearse": _Command("rehearsal", "fsdp"),
    "rehearsal-table": _Command("rehearsal", "fsdp"),
    "compile-check": _Command("compile_check", "jax"),
    "compile-table": _Command("compile_check", "jax"),
    "megatron-plan": _Command("layouts", "megatron"),
}


@hookimpl
def tinsmith_register_commands(group: typer.Typer) -> None:
    for name, (module, backend) in COMMANDS.items():
        if backend is None or find_spec(f"tinsmith_{backend}") is not None:
            functions = import_module(f"tinsmith_workbench.{module}.command")
            group.command(name)(getattr(functions, name.replace("-", "_")))
        else:
            anything = {"ignore_unknown_options": True, "allow_extra_args": True, "help_option_names": []}
            group.command(name, context_settings=anything, hidden=True)(_refusal(name, backend))


def _refusal(name: str, backend: str) -> Callable[[], None]:
    def refuse() -> None:
        msg = (
            f"`tinsmith {name}` computes with tinsmith-{backend}, which is not installed here; pip install "
            f"./libraries/workers ./plugins/{backend}_backend in a clone, 'tinsmith-workbench[{backend}]' from wheels"
        )
        raise ConfigError(msg)

    return refuse
