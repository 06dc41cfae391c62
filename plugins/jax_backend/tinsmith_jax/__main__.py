"""`python -m tinsmith_jax` is `tinsmith-jax`."""

from tinsmith_jax.compile_check.command import app

app()
