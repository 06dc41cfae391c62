"""The program of a rank's process."""

from tinsmith_fsdp.base_model import BaseModel
from tinsmith_fsdp.mesh import join_mesh
from tinsmith_fsdp.messages import Loaded, Setup
from tinsmith_fsdp.trainer import Trainer
from tinsmith_workers.torch import TorchRank


class Rank(TorchRank[Setup, Loaded, Trainer]):
    def _loaded(self, setup: Setup) -> tuple[Trainer, Loaded]:
        mesh = join_mesh(self._worker, self._device, setup.config)
        base = BaseModel(setup, mesh)
        base.load(self._report)
        return Trainer(base, mesh, setup), base.loaded()
