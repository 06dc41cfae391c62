"""Worker processes for a backend that spans devices and hosts. No ML framework.

The engine holds a `WorkerGroup`. Each worker makes the backend's program and calls its methods as the group asks. The
names exported here, by `tinsmith_workers.torch` and by `tinsmith_workers.testing` are public.
"""

from tinsmith_workers.adapter_layout import AdapterLayout, ModelPart, Pair, Slot, WholeLayout, holders, whole_model
from tinsmith_workers.budget import Budget
from tinsmith_workers.config import TrainingWorkersConfig, WorkersConfig
from tinsmith_workers.delta_blocks import delta_block_bytes, delta_flops
from tinsmith_workers.group import WorkerDiedError, WorkerGroup
from tinsmith_workers.launching import Launch, Launcher, MakeLauncher
from tinsmith_workers.model_states import AdapterModelState, FullModelState
from tinsmith_workers.program import (
    AdapterState,
    ModelStep,
    StateProgram,
    TrainingProgram,
    TrainingSetup,
    WorkerDevice,
    WorkersProgram,
)
from tinsmith_workers.sequences import (
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
from tinsmith_workers.serving import Worker, alone
from tinsmith_workers.state_files import StateFiles
from tinsmith_workers.state_writer import Slice, StateWriter, Written
from tinsmith_workers.training_backend import FAST_ISOLATION_ERROR, WorkersBackend, start_ranks

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
    "deal",
    "delta_block_bytes",
    "delta_flops",
    "holders",
    "one_by_one",
    "segments",
    "start_ranks",
    "whole_model",
]
