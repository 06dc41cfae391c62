"""The settings of the tracer: the keys of `tracing:` beside `plugin: otel`."""

from urllib.parse import urlsplit

from pydantic import Field, field_validator

import tinsmith


class OtelConfig(tinsmith.BackendConfig):
    endpoint: str | None = Field(
        None,
        description="URL of the collector, to which `/v1/traces` is added; default: `OTEL_EXPORTER_OTLP_ENDPOINT`, "
        "else `http://localhost:4318`",
    )
    sample_ratio: float | None = Field(
        None,
        ge=0,
        le=1,
        description="share of the operations that are traced; those of clients that send a `traceparent` are traced if "
        "the client says so. Default: `OTEL_TRACES_SAMPLER`, else all",
    )

    @field_validator("endpoint")
    @classmethod
    def _is_a_url(cls, value: str | None) -> str | None:
        if value is None or (urlsplit(value).scheme in {"http", "https"} and urlsplit(value).netloc):
            return value
        msg = "endpoint must be an http or https URL, such as http://localhost:4318"
        raise ValueError(msg)
