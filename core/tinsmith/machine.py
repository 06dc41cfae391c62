"""A toolbox for backends: processes that end with theirs, scratch directories, locks, compilers and GPUs."""

from tinsmith.fair_lock import FairLock
from tinsmith.host import count_gpus, find_compiler, lacks_gpus
from tinsmith.lifeline import Tethered, run_tethered
from tinsmith.scratch import Scratch
from tinsmith.settings import child_environment

__all__ = [
    "FairLock",
    "Scratch",
    "Tethered",
    "child_environment",
    "count_gpus",
    "find_compiler",
    "lacks_gpus",
    "run_tethered",
]
