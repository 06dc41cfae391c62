"""What runs in the process of one rank."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from tinsmith_checkpoints.huggingface import WeightFiles
from tinsmith_megatron.parallel import Coordinates, part_of
from tinsmith_megatron.program import Loaded, Setup
from tinsmith_workers import ModelPart, holders
from tinsmith_workers.torch import TorchRank

if TYPE_CHECKING:
    from tinsmith_megatron.megatron_here import Stage, Trainer


class Rank(TorchRank[Setup, Loaded, "Trainer"]):
    def _loaded(self, setup: Setup) -> tuple["Trainer", Loaded]:
        from tinsmith_megatron.megatron_here import LossTable, Stage, Trainer, groups

        groups.join(self._worker, self._device, setup.config)
        coordinates, losses = groups.own_coordinates(), LossTable(setup.losses)
        part = part_of(coordinates, setup.config, setup.architecture.shape)
        everyones: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyones, part)
        stage, read_bytes = None, 0
        if setup.config.max_lora_rank:
            stage = Stage(setup, losses).to(self._device)
            read_bytes = self._read(stage, setup, coordinates, part)
        is_holder = self._worker.rank == holders(everyones)[part]
        trainer = Trainer(stage, setup, losses, coordinates, part, self._device, is_holder=is_holder)
        size = sum(parameter.numel() * parameter.element_size() for parameter in (stage.parameters() if stage else ()))
        return trainer, Loaded(coordinates=coordinates, parameter_bytes=size, read_bytes=read_bytes)

    def _read(self, stage: "Stage", setup: Setup, coordinates: Coordinates, part: ModelPart) -> int:
        """Fill a stage from the model's files. No rank reads, or ever holds, more."""
        from tinsmith_megatron.megatron_here import canonical

        num_bytes, found = 0, canonical.named(stage, setup, coordinates, part)
        with WeightFiles(Path(setup.model_path), framework="pt") as files:
            for number, (parameter, pieces, _) in enumerate(found):
                num_bytes += canonical.read(files, pieces, canonical.matrix_of(parameter))
                self._report((number + 1) / len(found))
        return num_bytes
