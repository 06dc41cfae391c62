"""The plugin's offer: a tracer. Only a process that makes it imports OpenTelemetry."""

import tinsmith
from tinsmith.tracing import Tracer, TracerSpec
from tinsmith_otel.config import OtelConfig


def create(config: OtelConfig, process: str) -> Tracer:
    from tinsmith_otel.tracer import OtelTracer

    return OtelTracer(config, process)


@tinsmith.hookimpl
def tinsmith_register_tracers() -> TracerSpec[OtelConfig]:
    return TracerSpec(name="otel", config=OtelConfig, create=create, description="sends traces by OTLP over HTTP")
