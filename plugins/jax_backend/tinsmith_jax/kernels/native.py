"""The kernels for CPUs in C++ (cpu/): compiled once with the machine's compiler, then called by XLA's programs.

They belong to the process: once `load` has found or compiled them, programs may be compiled that call them.
"""

import ctypes
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

import jax

logger = logging.getLogger(__name__)

LAYERS: Final = "tinsmith_layers"
DRAW: Final = "tinsmith_draw"
FORWARD: Final = "tinsmith_forward"
BACKWARD: Final = "tinsmith_backward"
HEAD_FORWARD: Final = "tinsmith_head_forward"
HEAD_BACKWARD: Final = "tinsmith_head_backward"
STEP: Final = "tinsmith_step"

_SOURCES: Final = Path(__file__).with_name("cpu")
_FLAGS: Final = (
    "-std=c++17",
    "-O2",
    "-march=native",
    "-ffp-contract=fast",
    "-fno-math-errno",
    "-fno-strict-aliasing",
    "-fPIC",
    "-w",
)
"""Contraction is on everywhere, so that a product's sum is rounded alike in all forms of its loop. Pairs of bfloat16
are read as one number, which strict aliasing would forbid."""
_GCC_FLAGS: Final = ("-ftree-vectorize", "-fvect-cost-model=dynamic", "--param=avoid-fma-max-bits=0")
"""Without the last, GCC contracts some forms only: it believes that some processors add faster than they contract."""
_COMPILERS: Final = ("c++", "g++", "clang++")

_library: ctypes.CDLL | None = None


def loaded() -> bool:
    """Return whether this process has the kernels."""
    return _library is not None


def multiplies_bfloat16() -> bool:
    """Return whether the kernels are there, and this CPU has an instruction for products of bfloat16."""
    return _library is not None and bool(_library.tinsmith_multiplies_bfloat16())


def load(directory: Path) -> bool:
    """Load the kernels from `directory`, and compile them first if they are not there. Return whether that worked.

    A machine without a C++ compiler does without them.
    """
    global _library  # noqa: PLW0603 - XLA registers a target once per process, too
    if _library is not None:
        return True
    compiler = next((found for found in map(shutil.which, _compilers()) if found), None)
    if compiler is None:
        told = "no C++ compiler (%s) is installed: sampling on this CPU takes two to four times as long without one"
        logger.warning(told, ", ".join(_compilers()))
        return False
    try:
        library = ctypes.CDLL(str(_compiled(directory, compiler)))
    except (OSError, subprocess.SubprocessError) as error:
        told = "cannot compile the kernels for CPUs with %s, so XLA's are used, which are slower: %s"
        logger.warning(told, compiler, _reason(error))
        return False
    for name in (LAYERS, DRAW, FORWARD, BACKWARD, HEAD_FORWARD, HEAD_BACKWARD, STEP):
        jax.ffi.register_ffi_target(name, jax.ffi.pycapsule(getattr(library, name)), platform="cpu")
    _library = library
    return True


def _reason(error: Exception) -> str:
    """Return the compiler's first error, or what the system says."""
    said = getattr(error, "stderr", b"")
    lines = (said.decode(errors="replace") or str(error)).splitlines()
    return next((line for line in lines if "error" in line), lines[-1] if lines else repr(error))


def _compilers() -> tuple[str, ...]:
    chosen = os.environ.get("CXX")
    return (chosen,) if chosen else _COMPILERS


def _compiled(directory: Path, compiler: str) -> Path:
    """Return the library, which is kept as long as the sources, the compiler and the machine's instructions are."""
    sources = sorted(file for file in _SOURCES.iterdir() if file.suffix in {".cc", ".h"})
    command, version = _command(compiler), _run([compiler, "--version"])
    parts = [version, _instructions(), *(file.read_bytes() for file in sources), " ".join(command).encode()]
    library = directory / f"kernels-{hashlib.sha256(b'|'.join(parts)).hexdigest()[:16]}.so"
    if not library.exists():
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=directory) as scratch, ThreadPoolExecutor() as pool:
            objects = {file: f"{scratch}/{file.stem}.o" for file in sources if file.suffix == ".cc"}
            list(pool.map(_run, ([*command, "-c", str(file), "-o", made] for file, made in objects.items())))
            _run([*command, "-shared", *objects.values(), "-o", f"{scratch}/{library.name}"])
            Path(scratch, library.name).replace(library)
    return library


def _command(compiler: str) -> list[str]:
    own = () if b"clang" in _run([compiler, "--version"]) else _GCC_FLAGS
    return [compiler, *_FLAGS, *own, f"-I{jax.ffi.include_dir()}"]


def _run(command: Sequence[str]) -> bytes:
    return subprocess.run(command, check=True, capture_output=True).stdout


def _instructions() -> bytes:
    """Return what tells this machine's instructions from those of another that shares the directory."""
    info = Path("/proc/cpuinfo")
    lines = info.read_bytes().splitlines() if info.exists() else []
    return b"".join(sorted({line for line in lines if line.startswith((b"flags", b"Features"))})) or os.fsencode(
        f"{platform.machine()} {platform.processor()}"
    )
