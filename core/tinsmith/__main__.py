"""`python -m tinsmith` is the command line."""

from tinsmith.cli import app

app()
