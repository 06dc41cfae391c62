"""`python -m tinsmith` is the command line."""

from tinsmith.commands.cli import app

app()
