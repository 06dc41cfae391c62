"""What runs in the process of one rank."""

from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from tinsmith.torch_workers import TorchRank
from tinsmith.workers import holders
from tinsmith_megatron.messages import Loaded, Setup
from tinsmith_megatron.parallel import part_of

if TYPE_CHECKING:
    from tinsmith_megatron.megatron_here import Trainer


class Rank(TorchRank[Setup, Loaded, "Trainer"]):
    def _loaded(self, setup: Setup) -> tuple["Trainer", Loaded]:
        from tinsmith_megatron.megatron_here import LossTable, Stage, Trainer, WeightReader, groups

        groups.join(self._worker, self._device, setup.config)
        place, losses = groups.own_place(), LossTable(setup.losses)
        part = part_of(place, setup.config, setup.architecture.shape)
        everyones: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyones, part)
        stage, reader = None, WeightReader(setup, place)
        if setup.config.max_lora_rank:
            stage = Stage(setup, losses).to(self._device)
            reader.fill(stage, self._report)
        is_holder = self._worker.rank == holders(everyones)[part]
        trainer = Trainer(stage, setup, losses, place, part, self._device, is_holder=is_holder)
        size = sum(parameter.numel() * parameter.element_size() for parameter in (stage.parameters() if stage else ()))
        return trainer, Loaded(place=place, parameter_bytes=size, read_bytes=reader.read_bytes)
