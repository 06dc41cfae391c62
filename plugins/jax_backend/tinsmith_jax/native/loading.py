"""The kernels in C++ (cpp/), as XLA's programs call them.

They belong to the process: once `load` has found or compiled them, programs may be compiled that call them.
"""

import ctypes
import logging
import subprocess
from pathlib import Path
from typing import Final

import jax

from tinsmith.machine import find_compiler
from tinsmith_jax.native import library

logger = logging.getLogger(__name__)

UNTOUCHED: Final = "tinsmith_untouched"
LAYERS: Final = "tinsmith_layers"
DRAW: Final = "tinsmith_draw"
FORWARD: Final = "tinsmith_forward"
BACKWARD: Final = "tinsmith_backward"
HEAD_FORWARD: Final = "tinsmith_head_forward"
HEAD_BACKWARD: Final = "tinsmith_head_backward"
STEP: Final = "tinsmith_step"

loaded_library: ctypes.CDLL | None = None


def loaded() -> bool:
    """Return whether this process has the kernels."""
    return loaded_library is not None


def multiplies_bfloat16() -> bool:
    """Return whether the kernels are there, and this CPU has an instruction for products of bfloat16."""
    return loaded_library is not None and bool(loaded_library.tinsmith_multiplies_bfloat16())


def load(directory: Path) -> bool:
    """Load the kernels from `directory`, and compile them first if they are not there. Return whether that worked.

    A machine without a C++ compiler does without them.
    """
    global loaded_library  # noqa: PLW0603 - XLA registers a target once per process, too
    if loaded_library is not None:
        return True
    compiler = find_compiler()
    if compiler is None:
        logger.warning(
            "no C++ compiler is installed (c++, g++ or clang++, or the one that CXX names): sampling on this CPU takes "
            "two to four times as long without one"
        )
        return False
    try:
        path = library.begin(directory, compiler).result()
        with library.loading(path):
            found = ctypes.CDLL(str(path))
            found.tinsmith_multiplies_bfloat16()  # is code that runs
    except (OSError, subprocess.SubprocessError) as error:
        told = "cannot use kernels for CPUs that %s compiles, so XLA's are used, which are slower: %s"
        logger.warning(told, compiler, _reason(error))
        return False
    for name in (UNTOUCHED, LAYERS, DRAW, FORWARD, BACKWARD, HEAD_FORWARD, HEAD_BACKWARD, STEP):
        jax.ffi.register_ffi_target(name, jax.ffi.pycapsule(getattr(found, name)), platform="cpu")
    loaded_library = found
    return True


def _reason(error: Exception) -> str:
    """Return the compiler's first error, or what the system says."""
    said = getattr(error, "stderr", b"")
    lines = (said.decode(errors="replace") or str(error)).splitlines()
    return next((line for line in lines if "error" in line), lines[-1] if lines else repr(error))
