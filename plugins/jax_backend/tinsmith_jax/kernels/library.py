"""The library of the kernels in C++ (cpu/): compiled once with the machine's compiler, and kept. No jax here.

Compiling takes longer than importing jax, so it begins before.
"""

import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Final

SOURCES: Final = Path(__file__).with_name("cpu")
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


def begins_early(environment: Mapping[str, str]) -> bool:
    """Return whether jax is yet to be imported, and is known to compute on CPUs: told so, or without any plugin."""
    told = environment.get("JAX_PLATFORMS")
    on_cpu = told == "cpu" or not (told or find_spec("jax_plugins") or find_spec("libtpu"))
    return on_cpu and "jax" not in sys.modules


def compilers() -> tuple[str, ...]:
    """Return the names under which a compiler is looked for."""
    chosen = os.environ.get("CXX")
    return (chosen,) if chosen else _COMPILERS


def find_compiler() -> str | None:
    return next((found for found in map(shutil.which, compilers()) if found), None)


@cache
def begin(directory: Path, compiler: str) -> Future[Path]:
    """Look for the library in `directory` and compile it if it is not there, in a thread that this call starts.

    The result is its path. It raises OSError or CalledProcessError.
    """
    thread = ThreadPoolExecutor(1, thread_name_prefix="tinsmith-kernels")
    library = thread.submit(compiled, directory, compiler)
    thread.shutdown(wait=False)
    return library


def compiled(directory: Path, compiler: str) -> Path:
    """Return the library's path, and compile it first if it is not there.

    It is kept as long as the sources, the compiler and the machine's instructions are.
    """
    sources = sorted(file for file in SOURCES.iterdir() if file.suffix in {".cc", ".h"})
    version = _run([compiler, "--version"])
    call = command(compiler, version)
    parts = [version, _instructions(), *(file.read_bytes() for file in sources), " ".join(call).encode()]
    library = directory / f"kernels-{hashlib.sha256(b'|'.join(parts)).hexdigest()[:16]}.so"
    if not library.exists():
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=directory) as scratch, ThreadPoolExecutor() as pool:
            objects = {file: f"{scratch}/{file.stem}.o" for file in sources if file.suffix == ".cc"}
            list(pool.map(_run, ([*call, "-c", str(file), "-o", made] for file, made in objects.items())))
            _run([*call, "-shared", *objects.values(), "-o", f"{scratch}/{library.name}"])
            Path(scratch, library.name).replace(library)
    return library


def command(compiler: str, version: bytes) -> list[str]:
    """Return how the compiler, which says that it is of this version, is called."""
    own = () if b"clang" in version else _GCC_FLAGS
    return [compiler, *_FLAGS, *own, f"-I{_headers()}"]


def _headers() -> Path:
    """Return the directory that `jax.ffi.include_dir` names."""
    jaxlib = find_spec("jaxlib")
    assert jaxlib is not None
    assert jaxlib.origin is not None
    return Path(jaxlib.origin).with_name("include")


def _run(command: Sequence[str]) -> bytes:
    return subprocess.run(command, check=True, capture_output=True).stdout


def _instructions() -> bytes:
    """Return what tells this machine's instructions from those of another that shares the directory."""
    info = Path("/proc/cpuinfo")
    lines = info.read_bytes().splitlines() if info.exists() else []
    return b"".join(sorted({line for line in lines if line.startswith((b"flags", b"Features"))})) or os.fsencode(
        f"{platform.machine()} {platform.processor()}"
    )
