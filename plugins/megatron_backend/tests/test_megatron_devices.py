"""Where ranks compute: a GPU that torch cannot use is refused, and never replaced by the CPU."""

from pathlib import Path

import pytest
import torch
from megatron_harness import make_backend

from tinsmith import ConfigError, Placement
from tinsmith.workers import Launch, Launcher, alone
from tinsmith_megatron.rank import Rank


def test_a_rank_with_a_device_does_not_start_on_the_cpu(
    megatron_models: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def launch(wanted: Launch) -> Launcher:
        for name, value in wanted.environment.items():
            monkeypatch.setenv(name, value)
        raise InterruptedError

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(InterruptedError):
        make_backend(megatron_models["qwen3"], tmp_path, launch, placement=Placement(devices=("0",)), device=None)
    with alone() as worker, pytest.raises(ConfigError, match=r"sees no GPU .* CUDA_VISIBLE_DEVICES is '0'"):
        Rank(worker)
