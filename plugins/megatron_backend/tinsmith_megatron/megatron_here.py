"""Everything that needs Megatron. Importing it first puts the shim in place if this process sees no GPU."""

import torch

from tinsmith_megatron import cpu_shim
from tinsmith_workers.torch import LossTable

if not torch.cuda.is_available():
    cpu_shim.install()

from megatron.core.transformer.moe import moe_utils

if not hasattr(moe_utils, "te_general_gemm"):
    moe_utils.te_general_gemm = None  # 0.16.1's router reads this name even where TransformerEngine is absent

from tinsmith_megatron import canonical, groups
from tinsmith_megatron.stage import Stage
from tinsmith_megatron.trainer import Trainer

__all__ = ["LossTable", "Stage", "Trainer", "canonical", "groups"]
