"""The sampler of a base model that is only trained: `sampler: {plugin: none}`. Samples are refused."""

from typing import Never

from tinsmith.backend import BackendConfig, BackendContext, SamplerSpec
from tinsmith.hookspecs import hookimpl


def _create(config: BackendConfig, context: BackendContext) -> Never:
    raise AssertionError(config, context)


@hookimpl
def tinsmith_register_samplers() -> SamplerSpec[BackendConfig]:
    return SamplerSpec(
        name="none", config=BackendConfig, create=_create, description="nobody samples: the model is only trained"
    )
