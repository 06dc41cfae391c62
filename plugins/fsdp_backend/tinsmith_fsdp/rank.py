"""The program of a rank's process."""

from pathlib import Path

from tinsmith_fsdp.base_model import BaseModel
from tinsmith_fsdp.causal_lm import read_config
from tinsmith_fsdp.mesh import join_mesh
from tinsmith_fsdp.probe import require_packing
from tinsmith_fsdp.program import Loaded, Setup
from tinsmith_fsdp.trainer import Trainer
from tinsmith_workers.torch import TorchRank


class Rank(TorchRank[Setup, Loaded, Trainer]):
    def _loaded(self, setup: Setup) -> tuple[Trainer, Loaded]:
        mesh = join_mesh(self._worker, self._device, setup.config)
        config, probes = read_config(Path(setup.model_path)), None if setup.probes is None else Path(setup.probes)
        require_packing(setup.architecture.class_name, config, probes)
        base = BaseModel(setup, mesh)
        base.load(self._report)
        return Trainer(base, mesh, setup), base.loaded()
