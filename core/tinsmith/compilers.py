"""The C++ compiler of this machine."""

import os
import shutil
from typing import Final

_NAMES: Final = ("c++", "g++", "clang++")


def find_compiler() -> str | None:
    """Return the path of a C++ compiler: the one that CXX names, or the first that is installed."""
    chosen = os.environ.get("CXX")
    return next((found for found in map(shutil.which, (chosen,) if chosen else _NAMES) if found), None)
