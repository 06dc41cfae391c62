"""The hooks of tinsmith-vllm. Imported in every process. The parent's side, including this module, imports no vLLM."""

from tinsmith import BackendContext, SamplerSpec, SamplingBackend, hookimpl
from tinsmith_vllm.config import VllmConfig


def create(config: VllmConfig, context: BackendContext) -> SamplingBackend:
    """Start vLLM and wait until it answers."""
    from tinsmith_vllm.sampler import VllmSampler

    return VllmSampler(config, context)


@hookimpl
def tinsmith_register_samplers() -> SamplerSpec[VllmConfig]:
    return SamplerSpec(
        name="vllm",
        config=VllmConfig,
        create=create,
        description="samples with vLLM in a process of its own, one LoRA adapter per snapshot",
    )
