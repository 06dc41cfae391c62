"""Shared code of workers that train with torch. Nothing else in the distribution imports torch, or this package.

The names exported here are public: a backend that depends on torch imports this package in its workers.
"""

from tinsmith_workers.torch.adamw import Stepped, adamw_
from tinsmith_workers.torch.delta_rule import causal_convolution, gated_delta
from tinsmith_workers.torch.full_models import FullModelOfWorker, Piece, square_norm
from tinsmith_workers.torch.head import (
    HeadAdapters,
    Rows,
    Scores,
    Span,
    Vocabulary,
    score,
    score_with_gradients,
    scored,
)
from tinsmith_workers.torch.leaves import Leaves
from tinsmith_workers.torch.loss_table import LossBatch, LossTable
from tinsmith_workers.torch.models import Adapter, ModelsOfWorker, free_what_is_unused
from tinsmith_workers.torch.process_group import (
    all_gather_single,
    join_process_group,
    local_devices,
    reduce_scatter_single,
)
from tinsmith_workers.torch.rank import TorchRank
from tinsmith_workers.torch.sleeping import SleepingTensors, storage_bytes
from tinsmith_workers.torch.transfers import HostCopies, to_device, wait_for
from tinsmith_workers.torch.varlen import varlen_attention

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
    "causal_convolution",
    "free_what_is_unused",
    "gated_delta",
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
