"""The library of the kernels in C++ (cpp/): compiled once with the machine's compiler, and kept. No jax here.

Compiling takes longer than importing jax, so it begins before.

A damaged library, as a power cut leaves it, kills the process that loads it. So its digest stands at its end, where no
loader looks, and is compared first; and a loading process leaves a marker meanwhile. If a process has died there, the
library is compiled again; if the new one kills, too, this machine does without.
"""

import fcntl
import hashlib
import logging
import os
import platform
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache, partial
from importlib.util import find_spec
from pathlib import Path
from typing import Final

from tinsmith.machine import Scratch, child_environment, run_tethered

logger = logging.getLogger(__name__)

SOURCES: Final = Path(__file__).with_name("cpp")
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


def begins_early(environment: Mapping[str, str]) -> bool:
    """Return whether jax is yet to be imported, and is known to compute on CPUs."""
    return on_cpus(environment) and "jax" not in sys.modules


def on_cpus(environment: Mapping[str, str]) -> bool:
    """Return whether jax is known to compute on CPUs: told so, or without any plugin."""
    told = environment.get("JAX_PLATFORMS")
    return told == "cpu" or not (told or find_spec("jax_plugins") or find_spec("libtpu"))


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
    """Return the library's path, and compile it first if it is not there or damaged.

    It is kept as long as the sources, the compiler and the machine's instructions are. Raise OSError if it kills those
    that load it.
    """
    sources = sorted(file for file in SOURCES.iterdir() if file.suffix in {".cc", ".h"})
    version = run([compiler, "--version"])
    call = command(compiler, version)
    parts = [version, _instructions(), *(file.read_bytes() for file in sources), " ".join(call).encode()]
    library = directory / f"kernels-{hashlib.sha256(b'|'.join(parts)).hexdigest()[:16]}.so"
    deaths = _deaths(library)
    if any(generation > 0 for generation in deaths.values()):
        markers = ", ".join(map(str, deaths))
        msg = (
            f"loading them has ended this process before, also once they were compiled again; to try, remove {markers}"
        )
        raise OSError(msg)
    if deaths or not _is_intact(library):
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        with Scratch("compiling-", directory) as scratch, ThreadPoolExecutor() as pool:
            temporary = scratch.path
            objects = {file: f"{temporary}/{file.stem}.o" for file in sources if file.suffix == ".cc"}
            calls = [[*call, "-c", str(file), "-o", made] for file, made in objects.items()]
            list(pool.map(partial(run, temporary=temporary), calls))
            run([*call, "-shared", *objects.values(), "-o", f"{temporary}/{library.name}"], temporary=temporary)
            put(temporary / library.name, library)
    return library


def put(made: Path, library: Path) -> None:
    """Add the digest, and put the library in its place once it is on disk."""
    with made.open("r+b") as file:
        digest = hashlib.file_digest(file, "sha256").digest()
        file.write(digest)
        file.flush()
        os.fsync(file.fileno())
    made.replace(library)
    directory = os.open(library.parent, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


def _is_intact(library: Path) -> bool:
    try:
        content = library.read_bytes()
    except FileNotFoundError:
        return False
    size = hashlib.sha256().digest_size
    intact = hashlib.sha256(content[:-size]).digest() == content[-size:]
    if not intact:
        logger.warning("%s is damaged, the kernels are compiled again", library)
    return intact


@contextmanager
def loading(library: Path) -> Iterator[None]:
    """Leave a marker during the block, by which the next process knows if this one dies in it.

    Where none can be left, on a read-only or lockless file system, do without: the digest has been compared before.
    """
    deaths = _deaths(library)
    try:
        handle, marker = _mark(library, generation=int(bool(deaths)))
    except OSError as error:
        logger.warning("%s is loaded without a marker: %s", library, error)
        yield
        return
    try:
        yield
        for each in (marker, *deaths):
            each.unlink(missing_ok=True)
    finally:
        os.close(handle)


def _mark(library: Path, *, generation: int) -> tuple[int, Path]:
    """Return a locked marker, and the open file that holds the lock until this process ends, in whatever way."""
    handle, hidden = tempfile.mkstemp(prefix=".loading-", dir=library.parent)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        marker = library.with_name(f"{library.stem}.loading-{generation}-{Path(hidden).name[9:]}")
        Path(hidden).rename(marker)
    except BaseException:
        os.close(handle)
        Path(hidden).unlink(missing_ok=True)
        raise
    return handle, marker


def _deaths(library: Path) -> dict[Path, int]:
    """Return the markers of processes that died while they loaded the library: 0 = the first build, 1 = a later one."""
    found = {}
    for marker in library.parent.glob(f"{library.stem}.loading-*"):
        try:
            with marker.open("rb") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:  # it is loading, or has just ended; or locks or reads fail here
            continue
        found[marker] = int(marker.name.split(".loading-")[1].split("-")[0])
    return found


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


def run(command: Sequence[str], *, temporary: Path | None = None) -> bytes:
    """Return what the compiler says. Its own files go to `temporary`."""
    own = {} if temporary is None else {"TMPDIR": str(temporary)}
    done = run_tethered(command, env={**child_environment(), **own})
    done.check_returncode()
    return done.stdout


def _instructions() -> bytes:
    """Return a key of this machine's instruction set, because machines may share the directory."""
    info = Path("/proc/cpuinfo")
    lines = info.read_bytes().splitlines() if info.exists() else []
    return b"".join(sorted({line for line in lines if line.startswith((b"flags", b"Features"))})) or os.fsencode(
        f"{platform.machine()} {platform.processor()}"
    )
