"""The C++ compiler of this machine."""

import os
import shutil
from typing import Final

_NAMES: Final = ("c++", "g++", "clang++")


def compiler_names() -> tuple[str, ...]:
    """Return the names under which a compiler is looked for."""
    chosen = os.environ.get("CXX")
    return (chosen,) if chosen else _NAMES


def find_compiler() -> str | None:
    """Return the path of a C++ compiler: the one that CXX names, or the first that is installed."""
    return next((found for found in map(shutil.which, compiler_names()) if found), None)
