"""The `tinsmith` command line. Commands parse and print; the work is done in the modules they call."""

from __future__ import annotations

import codecs
import io
import os
import signal
import sys
import traceback
from importlib.metadata import version as distribution_version
from typing import Annotated, Any, Final

import typer
from rich.console import Console
from typer.core import TyperGroup

from tinsmith.commands.checkpoint import add_checkpoint_commands
from tinsmith.commands.demo import demo
from tinsmith.commands.doctor.command import doctor
from tinsmith.commands.options import WITH_MODEL
from tinsmith.commands.plan import plan
from tinsmith.commands.plugins import add_plugin_commands
from tinsmith.commands.runs import add_run_commands
from tinsmith.commands.serving import add_serving_commands
from tinsmith.commands.session import add_session_commands
from tinsmith.commands.status import add_status_commands
from tinsmith.errors import TinsmithError, UserError
from tinsmith.loopback import exempt_loopback
from tinsmith.plugins.loading import Plugins
from tinsmith.processes.logs import escape_lines
from tinsmith.settings.environment import remember_credentials
from tinsmith.settings.secrets import cleaned

WORKBENCH: Final = ("simulate", "rehearse", "rehearsal-table", "compile-check", "compile-table", "megatron-plan")
ELSEWHERE: Final = {
    **dict.fromkeys(WORKBENCH, "tools/workbench"),
    "conformance": "tools/conformance",
    "trackers": "tools/trackers",
    "worker": "libraries/workers",
}
"""Commands of other distributions that come from this repository, and where they are there."""
_SURROGATES: Final = ("\ud800", "\udfff")
"""What Python decodes bytes to that its file system encoding does not know."""
_EXIT_FAILED: Final = 1
_EXIT_USAGE: Final = 2


class CommandGroup(TyperGroup):
    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Raise UserError for a command of another distribution of ours that nobody has added."""
        place = ELSEWHERE.get(args[0])
        if place is not None and self.get_command(ctx, args[0]) is None:
            distribution = f"tinsmith-{place.rpartition('/')[2]}"
            msg = (
                f"`tinsmith {args[0]}` comes with {distribution}, which is not installed here, or is broken (see "
                f"`tinsmith plugins`); pip install ./{place} in a clone, {distribution} from wheels"
            )
            raise UserError(msg)
        return super().resolve_command(ctx, args)


def app() -> None:
    """Run the command line. An error meant for people goes to stderr without a traceback, with exit code 2."""
    remember_credentials()
    exempt_loopback(os.environ)
    _settle_process()
    _print_what_can_be_printed()
    plugins = Plugins.load()
    group = build_group(plugins)
    try:
        _check_arguments()
        group(obj=plugins, prog_name="tinsmith")
    except TinsmithError as error:
        console = Console(stderr=True, soft_wrap=True, emoji=False)
        console.print(f"[bold red]error:[/] {escape_lines(cleaned(str(error)))}", highlight=False)
        sys.exit(_EXIT_USAGE)
    except Exception:  # noqa: BLE001 - it ends the process, and its traceback may hold a secret
        sys.stderr.write(cleaned(traceback.format_exc()))
        sys.exit(_EXIT_FAILED)


def build_group(plugins: Plugins) -> typer.Typer:
    """Return all commands, including plugins'. Call it with `obj=plugins`."""
    group = typer.Typer(
        cls=CommandGroup,
        help="A self-hosted server for the Tinker API.",
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    group.callback()(_of_the_group)
    add_serving_commands(group)
    group.command("plan", context_settings=WITH_MODEL)(plan)
    group.command("doctor", context_settings=WITH_MODEL)(doctor)
    add_run_commands(group)
    add_status_commands(group)
    add_session_commands(group)
    add_plugin_commands(group)
    group.command("demo")(demo)
    add_checkpoint_commands(group)
    group.command("version")(version)
    plugins.add_commands(group)
    return group


def version() -> None:
    """Print the version of tinsmith."""
    typer.echo(f"tinsmith {distribution_version('tinsmith')}")


def _print_version(wanted: bool) -> None:
    if wanted:
        version()
        raise typer.Exit


def _of_the_group(
    _: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=_print_version, help="print the version, and exit")
    ] = False,
) -> None:
    """A self-hosted server for the Tinker API."""


def _check_arguments() -> None:
    """Raise UserError for one that this terminal's encoding cannot read: as a path, it would name another file."""
    for argument in sys.argv[1:]:
        if any(_SURROGATES[0] <= character <= _SURROGATES[1] for character in argument):
            msg = (
                f"{argument!a} cannot be read as {sys.getfilesystemencoding()}; set PYTHONUTF8=1, or a locale such "
                "as LC_ALL=C.UTF-8"
            )
            raise UserError(msg)


def _settle_process() -> None:
    """Set right what a shell or a service manager may have handed down, for this process and those that it starts."""
    os.umask(os.umask(0o022) | 0o002)  # others may write no file of ours
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # ignored, it would hide how processes end
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD})


def _print_what_can_be_printed() -> None:
    """Show characters that the terminal cannot encode as escapes, instead of ending the command."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and codecs.lookup(stream.encoding).name != "utf-8":
            stream.reconfigure(errors="backslashreplace")
