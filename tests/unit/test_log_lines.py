"""Lines of the log: with dates where nobody watches, and of other libraries only what is grave."""

import re
import subprocess
import sys

_PROGRAM = """
import logging
from tinsmith.processes.logs import log_to_stderr

log_to_stderr("debug")
for name in ("tinsmith.engine", "tinsmith_jax.rounds", "alembic.runtime", "jax"):
    logging.getLogger(name).info("all is well")
    logging.getLogger(name).warning("look here")
"""


def test_lines_have_dates_and_other_libraries_only_warn() -> None:
    said = subprocess.run([sys.executable, "-c", _PROGRAM], capture_output=True, text=True, check=True).stderr
    lines = [re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d[+-]\d{4} (.*)", each) for each in said.splitlines()]
    assert [each and each[1] for each in lines] == [
        "INFO tinsmith.engine: all is well",
        "WARNING tinsmith.engine: look here",
        "INFO tinsmith_jax.rounds: all is well",
        "WARNING tinsmith_jax.rounds: look here",
        "WARNING alembic.runtime: look here",
        "WARNING jax: look here",
    ]
