"""What one tenant asks of vLLM is neither read, failed nor delayed by another's: real vLLM, hostile requests."""

from dataclasses import replace

import pytest
from vllm_harness import draw, op, prompt

from tinsmith import Sample
from tinsmith.testing import in_one_loop
from tinsmith_vllm.sampler import VllmSampler

pytestmark = pytest.mark.slow  # it starts vLLM


def of_session(session: str, sample: Sample) -> Sample:
    return replace(sample, sampling_session_id=session)


@pytest.mark.parametrize("scored", [False, True])
@in_one_loop
async def test_no_session_reads_anothers_prompt_from_cache_hits(qwen3: VllmSampler, scored: bool) -> None:
    """Whoever guesses a prompt, block by block, sees what is guessed right if hits count across sessions."""
    secret = prompt(200 + scored, 100)
    wanted = op(secret, max_tokens=2)
    await draw(qwen3, of_session("victim", replace(wanted, prompt_logprobs=scored)))
    probes = [await draw(qwen3, of_session("prober", op(secret[:length], max_tokens=2))) for length in (34, 66, 100)]
    assert probes[0].prompt_cache_hit_tokens == 0
    again = await draw(qwen3, of_session("victim", wanted))
    assert again.prompt_cache_hit_tokens > 0, "a session's own prompts are still shared"
    fresh = await draw(qwen3, of_session("another", wanted))
    assert fresh.prompt_cache_hit_tokens == 0
