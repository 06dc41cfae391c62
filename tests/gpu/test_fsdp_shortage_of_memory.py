"""A pass of the fsdp backend that finds too little memory on the GPU."""

from collections.abc import Mapping
from pathlib import Path

import pytest
from gpu_harness import ON_CPU, add_models, farthest, observed, passes, scored
from observed_rank import ObservedRank

from tinsmith.errors import OutOfMemoryError
from tinsmith_fsdp.shortage import RECOVERS
from tinsmith_workers import WorkerDiedError

ROOM = 24 << 20


@pytest.mark.skipif(ON_CPU, reason="needs the GPU's allocator; the plugin's own tests have one for the CPU")
def test_a_pass_without_memory_changes_nothing_or_ends_the_rank(models: Mapping[str, Path], tmp_path: Path) -> None:
    with observed(models["qwen3"], tmp_path, compile=False, max_batch_tokens=65_536) as backend:
        names = [f"short-{number}" for number in range(16)]
        add_models(backend, names)
        few, many = passes(names[:1], seed=1), passes(names, seed=3, tokens=60_000)
        expected = scored(backend, few)
        backend.ranks.call(ObservedRank.leave_room, ROOM)
        if not RECOVERS:
            with pytest.raises(WorkerDiedError, match="out of memory"):
                backend.forward_backward(many)
            return
        try:
            scored(backend, many)  # in halves
        except OutOfMemoryError:
            assert not any(backend.capture_state(each).gradients for each in names[1:])
        backend.ranks.call(ObservedRank.leave_room, None)
        assert farthest(scored(backend, few), expected) == 0
