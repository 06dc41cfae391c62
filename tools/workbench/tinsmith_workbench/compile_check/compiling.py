"""Start the processes that compile, and collect what they leave."""

import importlib.util
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from tinsmith import ConfigError, ServerError
from tinsmith.machine import Scratch, Tethered
from tinsmith_workbench.compile_check.figures import PLANNED, Figures, read_figures
from tinsmith_workbench.compile_check.options import Options

_INTERVAL_S: Final = 0.2
_MOST_TOKENS: Final = 1 << 17
_INSTALL: Final = """compile-check needs libtpu, the compiler for TPUs, which is not installed here. Give it an \
environment of its own, because JAX would look for a TPU at each start of a server: python -m venv tpu; \
tpu/bin/pip install . ./libraries/checkpoints ./libraries/workers "./plugins/jax_backend[tpu]" ./tools/workbench; \
tpu/bin/tinsmith compile-check ..."""


def require_compiler() -> None:
    """Raise ConfigError if libtpu is not installed."""
    if importlib.util.find_spec("libtpu") is None:
        raise ConfigError(_INSTALL)


def compile_program(options: Options, program: str, *, code: bool) -> Figures:
    """Compile one program; without `code` only until the compiler has planned its memory.

    Raise ConfigError if model and mesh do not fit together, ServerError if the compiler breaks.
    """
    with Scratch("tinsmith-compile-") as scratch:
        place = scratch.path
        with _child(options, program, place) as child:
            while child.poll() is None and (code or not any(place.glob(PLANNED))):
                time.sleep(_INTERVAL_S)
        _raise_if_broken(place, child.returncode)
        return read_figures(options, program, place, has_code=code)


def largest_that_fits(options: Options, program: str) -> Iterator[Figures]:
    """Compile the program for more and more tokens, as long as it fits: each twice as many as the one before."""
    tokens = 1 << (options.context - 1).bit_length()
    while tokens <= _MOST_TOKENS:
        figures = compile_program(options.model_copy(update={"tokens": tokens}), program, code=False)
        yield figures
        if not figures.fits:
            return
        tokens *= 2


@contextmanager
def _child(options: Options, program: str, place: Path) -> Iterator[Tethered]:
    """Start a compilation, and end it on leaving."""
    environment = {
        **os.environ,
        "PYTHONSAFEPATH": "1",  # nothing is imported from the current directory
        "JAX_PLATFORMS": "cpu",  # a TPU that is there is left alone
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",  # as by the server that uses it; compiling needs no device
        "XLA_FLAGS": f"--xla_dump_to={place} --xla_dump_hlo_as_text",
    }
    command = [
        sys.executable,
        "-m",
        "tinsmith_workbench.compile_check.child",
        options.model_dump_json(),
        program,
        str(place),
    ]
    with (place / "log.txt").open("wb") as log, Tethered(command, env=environment, stdout=log, stderr=log) as child:
        yield child


def _raise_if_broken(place: Path, code: int) -> None:
    error = place / "error.txt"
    if not (place / "facts.json").exists() and error.exists():
        raise ConfigError(error.read_text(encoding="utf-8"))
    if not error.exists() and not any(place.glob(PLANNED)):
        lines = (place / "log.txt").read_text(encoding="utf-8", errors="replace").strip().splitlines()
        msg = f"the compiler ended with code {code} and said: {' / '.join(lines[-3:]) or 'nothing'}"
        raise ServerError(msg)
