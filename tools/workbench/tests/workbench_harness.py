"""Types commands of the workbench, installed or not."""

import typer
from typer.testing import CliRunner

from tinsmith_workbench.plugin import tinsmith_register_commands


def typed(*arguments: str) -> str:
    """Return what the command prints. Errors pass through."""
    group = typer.Typer()
    tinsmith_register_commands(group)
    result = CliRunner().invoke(group, arguments, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output
