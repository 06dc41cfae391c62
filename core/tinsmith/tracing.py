"""For plugins that record traces: the tracer's seam, what a tracer is told, and the phases of operations."""

from tinsmith.figures import WorkerCall, WorkerTime
from tinsmith.phases import PHASES, Phase
from tinsmith.tracer import BatchFinished, RequestFinished, Tracer, TracerSpec

__all__ = ["PHASES", "BatchFinished", "Phase", "RequestFinished", "Tracer", "TracerSpec", "WorkerCall", "WorkerTime"]
