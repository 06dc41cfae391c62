"""Shared code of workers that train with torch. The only package of the core that imports torch.

Nothing else in the core imports it. The names exported here are public: a backend that depends on torch may import this
module in its workers, besides `tinsmith` and `tinsmith.workers`.
"""

from tinsmith.torch_workers.adamw import Stepped, adamw_
from tinsmith.torch_workers.collectives import all_gather_single, reduce_scatter_single
from tinsmith.torch_workers.full_models import FullModelOfWorker, Piece, square_norm
from tinsmith.torch_workers.head import (
    HeadAdapters,
    Rows,
    Scores,
    Span,
    Vocabulary,
    score,
    score_with_gradients,
    scored,
)
from tinsmith.torch_workers.leaves import Leaves
from tinsmith.torch_workers.loss_table import LossBatch, LossTable
from tinsmith.torch_workers.models import Adapter, ModelsOfWorker, free_what_is_unused
from tinsmith.torch_workers.process_group import join_process_group, local_devices
from tinsmith.torch_workers.rank import TorchRank
from tinsmith.torch_workers.sleeping import SleepingTensors, storage_bytes
from tinsmith.torch_workers.transfers import HostCopies, to_device, wait_for
from tinsmith.torch_workers.varlen import varlen_attention

__all__ = [
    "Adapter",
    "FullModelOfWorker",
    "HeadAdapters",
    "HostCopies",
    "Leaves",
    "LossBatch",
    "LossTable",
    "ModelsOfWorker",
    "Piece",
    "Rows",
    "Scores",
    "SleepingTensors",
    "Span",
    "Stepped",
    "TorchRank",
    "Vocabulary",
    "adamw_",
    "all_gather_single",
    "free_what_is_unused",
    "join_process_group",
    "local_devices",
    "reduce_scatter_single",
    "score",
    "score_with_gradients",
    "scored",
    "square_norm",
    "storage_bytes",
    "to_device",
    "varlen_attention",
    "wait_for",
]
