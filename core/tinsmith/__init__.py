"""tinsmith: a self-hosted server for the Tinker API. This module holds the names a plugin author needs."""

from tinsmith.backend import (
    BackendConfig,
    BackendContext,
    BackendSpec,
    Capabilities,
    HostSnapshot,
    ModelState,
    SamplerSpec,
    SamplingBackend,
    Snapshot,
    TrainingBackend,
)
from tinsmith.errors import TinsmithError, UserError
from tinsmith.hook_values import Principal
from tinsmith.hookspecs import hookimpl
from tinsmith.losses import LossSpec
from tinsmith.operations import (
    AdamParams,
    CreateModel,
    Datum,
    Failed,
    Forward,
    ForwardBackward,
    ForwardBackwardOutput,
    LoraConfig,
    OptimStep,
    OptimStepOutput,
    Sample,
    SampledSequence,
    SampleOutput,
    SamplingParams,
    TopLogprobs,
)
from tinsmith.scheduler import Batch, Limits, Pending, Scheduler, SchedulerSpec
from tinsmith.store import RequestStore, StoreContext, StoreSpec

__all__ = [
    "AdamParams",
    "BackendConfig",
    "BackendContext",
    "BackendSpec",
    "Batch",
    "Capabilities",
    "CreateModel",
    "Datum",
    "Failed",
    "Forward",
    "ForwardBackward",
    "ForwardBackwardOutput",
    "HostSnapshot",
    "Limits",
    "LoraConfig",
    "LossSpec",
    "ModelState",
    "OptimStep",
    "OptimStepOutput",
    "Pending",
    "Principal",
    "RequestStore",
    "Sample",
    "SampleOutput",
    "SampledSequence",
    "SamplerSpec",
    "SamplingBackend",
    "SamplingParams",
    "Scheduler",
    "SchedulerSpec",
    "Snapshot",
    "StoreContext",
    "StoreSpec",
    "TinsmithError",
    "TopLogprobs",
    "TrainingBackend",
    "UserError",
    "hookimpl",
]
