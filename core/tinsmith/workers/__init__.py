"""Worker processes for a backend that spans devices and hosts. No ML framework.

The engine holds a `WorkerGroup`. Each worker makes the backend's program and calls its methods as the group asks. The
names exported here are public: plugins may import this module besides `tinsmith`.
"""

from tinsmith.workers.adapter_layout import AdapterLayout, ModelPart, Pair, Slot, WholeLayout, holders, whole_model
from tinsmith.workers.adapter_models import AdapterModelState
from tinsmith.workers.budget import Budget
from tinsmith.workers.config import TrainingWorkersConfig, WorkersConfig
from tinsmith.workers.full_models import FullModelState
from tinsmith.workers.gpus import count_gpus, lacks_gpus
from tinsmith.workers.group import WorkerDiedError, WorkerGroup
from tinsmith.workers.launching import Launch, Launcher, MakeLauncher
from tinsmith.workers.program import (
    AdapterState,
    ModelStep,
    StateProgram,
    TrainingProgram,
    TrainingSetup,
    WorkerDevice,
    WorkersProgram,
)
from tinsmith.workers.sequences import (
    Answer,
    ExpertLoad,
    MicroBatch,
    NotFinite,
    Scored,
    Segment,
    combined_outputs,
    deal,
    one_by_one,
    segments,
)
from tinsmith.workers.serving import Worker, alone
from tinsmith.workers.starting import start_ranks
from tinsmith.workers.state_files import StateFiles
from tinsmith.workers.state_writer import Slice, StateWriter, Written
from tinsmith.workers.training_backend import FAST_ISOLATION_ERROR, WorkersBackend

__all__ = [
    "FAST_ISOLATION_ERROR",
    "AdapterLayout",
    "AdapterModelState",
    "AdapterState",
    "Answer",
    "Budget",
    "ExpertLoad",
    "FullModelState",
    "Launch",
    "Launcher",
    "MakeLauncher",
    "MicroBatch",
    "ModelPart",
    "ModelStep",
    "NotFinite",
    "Pair",
    "Scored",
    "Segment",
    "Slice",
    "Slot",
    "StateFiles",
    "StateProgram",
    "StateWriter",
    "TrainingProgram",
    "TrainingSetup",
    "TrainingWorkersConfig",
    "WholeLayout",
    "Worker",
    "WorkerDevice",
    "WorkerDiedError",
    "WorkerGroup",
    "WorkersBackend",
    "WorkersConfig",
    "WorkersProgram",
    "Written",
    "alone",
    "combined_outputs",
    "count_gpus",
    "deal",
    "holders",
    "lacks_gpus",
    "one_by_one",
    "segments",
    "start_ranks",
    "whole_model",
]
