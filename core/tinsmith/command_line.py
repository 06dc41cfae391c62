"""For packages that add commands to `tinsmith`: the options that such commands share, and the request store.

A command with the context `ANY_SETTING` takes every setting as an option, as the core's own do.
"""

from tinsmith.commands.added import subgroup, use_store
from tinsmith.commands.open_store import find_run
from tinsmith.commands.options import ANY_SETTING, AsJson, ConfigFile, DataDir
from tinsmith.commands.runs import Run
from tinsmith.commands.runs_tables import print_json

__all__ = ["ANY_SETTING", "AsJson", "ConfigFile", "DataDir", "Run", "find_run", "print_json", "subgroup", "use_store"]
