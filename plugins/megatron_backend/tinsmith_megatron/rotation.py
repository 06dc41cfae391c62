"""The rotary angles of a stream's rows, which count positions within each sequence."""

import torch
from torch import nn

from tinsmith_checkpoints.huggingface import Rope
from tinsmith_megatron.streams import Stream
from tinsmith_megatron.untyped import Untyped


def angles(positions_T: torch.Tensor, inv_freq: torch.Tensor) -> torch.Tensor:
    """Return the angles of each row, [T, 1, 1, rotated dimensions]."""
    half = positions_T[:, None].float() * inv_freq
    return torch.cat([half, half], dim=-1)[:, None, None]


class PackedRotation(nn.Module):
    """In the place of Megatron's module, which counts positions from the first row of a batch."""

    _inv_freq: torch.Tensor

    def __init__(self, rope: Rope) -> None:
        super().__init__()
        self.register_buffer("_inv_freq", torch.tensor(rope.inv_freq), persistent=False)
        self._factor = rope.factor
        self.stream: Stream | None = None  # of the current micro-batch

    def get_rotary_seq_len(self, *_: Untyped) -> int:
        assert self.stream is not None
        return self.stream.num_rows

    def forward(self, num_rows: int, **_: Untyped) -> tuple[torch.Tensor, float]:
        """Return the angles, and what to multiply cosines and sines by."""
        assert self.stream is not None
        assert num_rows == self.stream.num_rows
        return angles(self.stream.positions_T, self._inv_freq), self._factor
