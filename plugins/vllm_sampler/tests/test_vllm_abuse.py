"""What one tenant asks of vLLM is neither read, failed nor delayed by another's: real vLLM, hostile requests."""

import asyncio
import os
import signal
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from vllm_harness import CONTEXT, blank_adapter, draw, make_sampler, op, prompt, random_adapter

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


@pytest.mark.thorough  # test_vllm_processes.py has this with small processes in vLLM's place
@pytest.mark.parametrize("how", [signal.SIGSEGV, signal.SIGSTOP])
@in_one_loop
async def test_what_a_dying_or_paused_process_drew_is_drawn_again(
    tiny_models: dict[str, Path], tmp_path: Path, how: signal.Signals
) -> None:
    """Together, and as samples that nobody disturbed, as closely as vLLM claims. A pause outlasts the time-out.

    Drawn again, they share a batch, and kernels round by the number of rows in it: so `isolation_error` bounds what
    changes. Draws are the same unless two tokens are that close, which with these seeds none are.
    """
    sampler = make_sampler(tiny_models["qwen3"], tmp_path, step_timeout_s=5)
    try:
        adapter = random_adapter("adapter", blank_adapter(), seed=5)
        await sampler.load_snapshot(adapter)
        wanted = [
            op(prompt(80 + n, 9), adapter.snapshot_id if n % 2 else None, max_tokens=CONTEXT - 9, seed=n)
            for n in range(4)
        ]
        expected = [await draw(sampler, each) for each in wanted]
        running = [asyncio.create_task(draw(sampler, each)) for each in wanted]
        while await sampler.num_running() < len(wanted):
            pass  # each question is a round trip to the process
        (pid,) = sampler.process_ids
        os.kill(pid, how)
        found = await asyncio.gather(*running)
        assert sampler.process_ids != [pid]
        for output, alone in zip(found, expected, strict=True):
            for sequence, right in zip(output.sequences, alone.sequences, strict=True):
                np.testing.assert_array_equal(sequence.tokens, right.tokens)
                bound = sampler.sampler_capabilities.isolation_error
                assert 0 < bound <= 2e-5, "the claim itself"
                np.testing.assert_allclose(sequence.logprobs, right.logprobs, rtol=0, atol=bound)
    finally:
        sampler.close()
