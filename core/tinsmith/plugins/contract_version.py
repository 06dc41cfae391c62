"""The version of the contract between the core and plugins, and which one a plugin says it was built for.

The contract is all that a plugin implements or is handed: the hooks, and the classes that `tinsmith` exports. Its
version goes up when something in it is taken away or comes to mean something else; a new hook, or a new field with a
default, needs no new version. A plugin says in its distribution's metadata what it was built for, so that it is known
before any of its code runs: docs/adr/0013-plugins-say-what-they-were-built-for.md.
"""

import re
from importlib.metadata import EntryPoint
from typing import Final

from tinsmith.errors import ContractVersionError, PluginError

CONTRACT_VERSION: Final = 1
CONTRACT_GROUP: Final = "tinsmith.contract"  # entry points: the plugin's name = "v1"
_OF_THE_SILENT: Final = 1  # older plugins declare no version


def built_for(entry_point: EntryPoint) -> int:
    """Return the contract version that a plugin declares. Raise PluginError if it is malformed."""
    beside = entry_point.dist.entry_points if entry_point.dist is not None else ()
    for each in beside:
        if each.group == CONTRACT_GROUP and each.name == entry_point.name:
            found = re.fullmatch(r"v([1-9][0-9]{0,8})", each.value)
            if found is None:
                msg = f"it says contract version {each.value!r}; it must be v and a number, as v{CONTRACT_VERSION}"
                raise PluginError(msg)
            return int(found[1])
    return _OF_THE_SILENT


def check_built_for(version: int, *, distribution: str, core: str) -> None:
    """Raise ContractVersionError unless it is ours; `core` is the version of tinsmith."""
    if version == CONTRACT_VERSION:
        return
    newer = "a newer tinsmith, or " if version > CONTRACT_VERSION else ""
    msg = (
        f"it was built for version {version} of the plugin contract, and tinsmith {core} has version "
        f"{CONTRACT_VERSION}; install {newer}a release of {distribution} that was built for version {CONTRACT_VERSION}"
    )
    raise ContractVersionError(msg)
