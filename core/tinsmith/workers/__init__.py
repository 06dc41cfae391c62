"""Worker processes for a backend that spans devices and hosts. No ML framework.

The engine holds a `WorkerGroup`. Each worker makes the backend's program and calls its methods as the group asks. The
names exported here are public: plugins may import this module besides `tinsmith`.
"""

from tinsmith.workers.adapter_layout import AdapterLayout, ModelPart, Pair, Slot, WholeLayout, holders, whole_model
from tinsmith.workers.adapter_models import AdapterModelState
from tinsmith.workers.budget import Budget
from tinsmith.workers.config import LauncherName, TrainingWorkersConfig, WorkersConfig
from tinsmith.workers.full_models import FullModelState
from tinsmith.workers.gpus import count_gpus, lacks_gpus
from tinsmith.workers.group import WorkerDiedError, WorkerGroup
from tinsmith.workers.launching import Launch, Launcher, MakeLauncher
from tinsmith.workers.program import (
    AdapterState,
    FullState,
    LoadingProgram,
    ModelStep,
    SleepableProgram,
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
from tinsmith.workers.serving import Worker, alone, serve
from tinsmith.workers.state_files import Capture, StateFiles
from tinsmith.workers.state_writer import Slice, StateWriter, Written
from tinsmith.workers.training_backend import (
    FAST_ISOLATION_ERROR,
    SleepableWorkersBackend,
    WorkersBackend,
    agreed_device,
    start_ranks,
)

__all__ = [
    "FAST_ISOLATION_ERROR",
    "AdapterLayout",
    "AdapterModelState",
    "AdapterState",
    "Answer",
    "Budget",
    "Capture",
    "ExpertLoad",
    "FullModelState",
    "FullState",
    "Launch",
    "Launcher",
    "LauncherName",
    "LoadingProgram",
    "MakeLauncher",
    "MicroBatch",
    "ModelPart",
    "ModelStep",
    "NotFinite",
    "Pair",
    "Scored",
    "Segment",
    "SleepableProgram",
    "SleepableWorkersBackend",
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
    "agreed_device",
    "alone",
    "combined_outputs",
    "count_gpus",
    "deal",
    "holders",
    "lacks_gpus",
    "one_by_one",
    "segments",
    "serve",
    "start_ranks",
    "whole_model",
]
